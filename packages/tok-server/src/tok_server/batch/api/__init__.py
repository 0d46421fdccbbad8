"""/v1/files and /v1/batches."""

from __future__ import annotations

from tok_server.batch.api import batches, files
from tok_server.batch.api.app import add_batches
from tok_server.batch.api.metrics import BatchStats

__all__ = ["BATCH_OPERATIONS", "BatchStats", "add_batches"]

BATCH_OPERATIONS = (*files.OPERATIONS, *batches.OPERATIONS)
