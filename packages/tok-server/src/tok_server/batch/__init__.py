"""Batches: files of requests, answered line by line and stored in SQLite, so that they survive crashes."""

from __future__ import annotations

from tok_server.batch.api import BATCH_OPERATIONS, add_batches
from tok_server.batch.offline import BadInput, Offline, showing
from tok_server.batch.storage import Totals

__all__ = [
    "BATCH_OPERATIONS",
    "BadInput",
    "Offline",
    "Totals",
    "add_batches",
    "showing",
]
