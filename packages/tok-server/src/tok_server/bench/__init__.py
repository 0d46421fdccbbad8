"""`tok bench`: measure throughput of the engine, or of any OpenAI-compatible server, on a fixed list of requests."""

from __future__ import annotations

__all__: list[str] = []
