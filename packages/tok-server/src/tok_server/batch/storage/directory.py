"""DataDirectory: paths of all batch data in a data directory, accessible only to the owner of the process."""

from __future__ import annotations

import logging
import os
import re
import stat
from pathlib import Path

from tok_server.batch.storage.blobs import PRIVATE_DIRECTORY, Blobs, make_directory, sync_directory
from tok_server.batch.storage.database import SIDE_FILES, StoreError

log = logging.getLogger("tok.server")

BATCH_ID = re.compile(r"batch_[0-9a-f]{24}")
SUFFIX = ".sqlite"


class DataDirectory:
    """Paths in a data directory, which is created if missing. Errors: StoreError."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.lock = directory / "batches.lock"
        self.store = directory / "batches.sqlite"
        self.lost = directory / "lost"
        self.answers_directory = directory / "batches"
        try:
            _make_data_directory(directory, self.store)
            self.blobs = Blobs(directory / "files")
            make_directory(self.answers_directory)
        except OSError as error:
            raise StoreError(f"data directory {directory}: cannot be created: {error.strerror or error}") from error

    def answers(self, batch_id: str) -> Path:
        """Return the path of a batch's answers, used until the batch ends. Raises ValueError for an invalid id."""
        if not BATCH_ID.fullmatch(batch_id):
            raise ValueError(f"batch id {batch_id[:80]!r}; allowed: batch_ and 24 hexadecimal digits")
        return self.answers_directory / (batch_id + SUFFIX)

    def answer_ids(self) -> list[str]:
        """Return the ids of all batches with stored answers."""
        ids = {path.name.partition(SUFFIX)[0] for path in self.answers_directory.iterdir()}
        return sorted(filter(BATCH_ID.fullmatch, ids))

    def set_aside(self, path: Path) -> Path:
        """Move a file into `lost/` without overwriting another, and return its new path. Errors: OSError."""
        make_directory(self.lost)
        target, count = self.lost / path.name, 0
        while target.exists():
            count += 1
            target = self.lost / f"{path.name}.{count}"
        os.rename(path, target)
        sync_directory(self.lost)
        return target

    def set_answers_aside(self, batch_id: str) -> None:
        """Move a batch's answers into `lost/`, if it has any. Errors: OSError."""
        path = self.answers(batch_id)
        sides = [path.with_name(path.name + side) for side in SIDE_FILES]
        if moved := [str(self.set_aside(side)) for side in sides if side.exists()]:
            log.warning("%s: moved its answers to %s", batch_id, moved[0])


def _make_data_directory(directory: Path, index: Path) -> None:
    """Create the data directory. An existing one with foreign files, another owner or a sticky bit keeps its mode."""
    if not directory.exists():
        make_directory(directory)
        return
    status = directory.stat()
    open_to_others = status.st_mode & 0o077
    created_by_us = index.exists() or not any(directory.iterdir())
    if open_to_others and created_by_us and status.st_uid == os.geteuid() and not status.st_mode & stat.S_ISVTX:
        directory.chmod(PRIVATE_DIRECTORY)
    elif open_to_others:
        log.warning("other users of this machine can access data directory %s: run chmod 700 %s", directory, directory)
