"""Parameters of an endpoint as a call to send."""
