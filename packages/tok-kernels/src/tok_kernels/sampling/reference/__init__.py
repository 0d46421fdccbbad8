"""Sample tokens in plain torch."""
