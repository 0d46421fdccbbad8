"""Compute linear layers, fused with the norm before them and the activation or residual addition after them."""
