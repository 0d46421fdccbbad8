"""The dashboard at /: how the server does, live, and a chat with its model."""
