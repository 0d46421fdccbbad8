"""`tok batch`: a file of requests answered without a server, resumable at any moment."""

from __future__ import annotations

from tok_server.batch.offline.offline import BadInput, Offline
from tok_server.batch.offline.progress import showing

__all__ = [
    "BadInput",
    "Offline",
    "showing",
]
