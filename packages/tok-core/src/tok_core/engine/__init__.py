"""The engine's front: `Engine` and `AsyncEngine`, the state of open requests, and the routing of their output."""
