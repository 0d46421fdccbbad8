"""`tok batch`: answer a file of requests without a server; a run can be resumed after any interruption."""

from __future__ import annotations

from tok_server.batch.offline.offline import BadInput, Offline
from tok_server.batch.offline.progress import showing

__all__ = [
    "BadInput",
    "Offline",
    "showing",
]
