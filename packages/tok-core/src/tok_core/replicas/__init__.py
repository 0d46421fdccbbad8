"""Replicas of an engine: starting, supervising and restarting them, on this host or by Ray, and dispatching to them."""
