"""Linear layers with the norm before, and the activation or residual addition after."""
