"""Tool calls: what the client offers, and how the model's text is read as calls of it."""
