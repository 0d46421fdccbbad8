"""`tok batch`: answer a file of requests without a server; a run can be resumed after any interruption."""

from __future__ import annotations

from tok_server.batch.offline.offline import InvalidInput, OfflineBatch
from tok_server.batch.offline.progress import show_progress

__all__ = ["InvalidInput", "OfflineBatch", "show_progress"]
