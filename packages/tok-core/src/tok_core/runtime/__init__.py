"""Primitives of every process: heartbeat, lifeline to its parent, log format, scratch directories, collector."""
