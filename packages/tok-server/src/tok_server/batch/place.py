"""Place: where in a data directory everything of batches is."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from tok_server.batch.blobs import Blobs
from tok_server.batch.database import StoreError, remove_database

BATCH_ID = re.compile(r"batch_[0-9a-f]{24}")
SUFFIX = ".sqlite"


class Place:
    """The directory, made if it is missing. Errors: StoreError."""

    def __init__(self, directory: Path) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self.blobs = Blobs(directory / "files")
            self._answers = directory / "batches"
            self._answers.mkdir(exist_ok=True)
        except OSError as error:
            raise StoreError(f"data directory {directory}: cannot be made: {error.strerror or error}") from error
        self.directory = directory
        self.lock = directory / "batches.lock"
        self.store = directory / "batches.sqlite"

    def answers(self, batch_id: str) -> Path:
        """Where a batch's answers are until it ends. Raises ValueError for what is no id."""
        if not BATCH_ID.fullmatch(batch_id):
            raise ValueError(f"batch id {batch_id[:80]!r}; allowed: batch_ and 24 hexadecimal digits")
        return self._answers / (batch_id + SUFFIX)

    def sweep(self, files: Collection[str], open_batches: Collection[str]) -> None:
        """Deletes what a death has left of others than these."""
        self.blobs.sweep(files)
        ids = {path.name.partition(SUFFIX)[0] for path in self._answers.iterdir()}
        for id in filter(BATCH_ID.fullmatch, ids.difference(open_batches)):
            remove_database(self.answers(id))
