"""`tok bench`: how fast the engine, or any OpenAI-compatible server, works off a fixed list of requests."""

from __future__ import annotations

__all__: list[str] = []
