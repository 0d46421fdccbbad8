"""The engine's front end: `Engine` and `AsyncEngine`, the state of open requests, and the routing of their output."""

from __future__ import annotations

from tok_core.engine.engine import AsyncEngine, Engine, Prompt
from tok_core.engine.request_stream import RequestStream

__all__ = [
    "AsyncEngine",
    "Engine",
    "Prompt",
    "RequestStream",
]
