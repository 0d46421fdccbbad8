"""Batches: files of requests, answered line by line and stored in SQLite, so that they survive crashes."""

from __future__ import annotations

from tok_server.batch.api import BATCH_OPERATIONS, BatchStats, add_batches
from tok_server.batch.offline import InvalidInput, OfflineBatch, show_progress
from tok_server.batch.storage import Totals

__all__ = ["BATCH_OPERATIONS", "BatchStats", "InvalidInput", "OfflineBatch", "Totals", "add_batches", "show_progress"]
