"""The dashboard at /: live statistics of the server, and a chat with its model."""

from __future__ import annotations

from tok_server.dashboard.events import add_dashboard

__all__ = ["add_dashboard"]
