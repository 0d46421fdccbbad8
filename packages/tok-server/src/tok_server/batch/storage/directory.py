"""DataDirectory: paths of all batch data, accessible only to the owner of the process; its lock and its quota."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import stat
import threading
from pathlib import Path

from tok_server.batch.storage.blobs import PRIVATE_DIRECTORY, Blobs, make_directory, sync_directory
from tok_server.batch.storage.database import SIDE_FILES, StoreError

log = logging.getLogger("tok.server")

BATCH_ID = re.compile(r"batch_[0-9a-f]{24}")
SUFFIX = ".sqlite"


class FileLock:
    """Exclusive lock on `path`, a file made for it, until closed. Errors: StoreError naming the holding process."""

    def __init__(self, path: Path, name: str) -> None:
        self._descriptor = _acquire(path, name)
        # The last holder may have deleted the file at its end: a lock on a deleted file excludes no other process.
        while not _is_same_file(self._descriptor, path):
            os.close(self._descriptor)
            self._descriptor = _acquire(path, name)
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, b"%d\n" % os.getpid())

    def close(self) -> None:
        """Release the lock. The file stays, since another process may have opened it to lock it."""
        os.close(self._descriptor)


def _acquire(path: Path, name: str) -> int:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreError(f"{path}: cannot be opened: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise StoreError(f"{name} is in use by another tok process ({holder})") from error
    return descriptor


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


class QuotaExceeded(OSError):
    """The data directory would exceed its quota."""

    def __init__(self, limit: int) -> None:
        super().__init__(errno.EDQUOT, f"the data directory has reached its quota of {limit} bytes")


class Quota:
    """Bytes used by each file or batch id. Thread-safe.

    limit  bytes; None: unlimited
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._sizes: dict[str, int] = {}
        self._used = 0
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        """Return the bytes of all ids together."""
        return self._used

    def put(self, id: str, size: int) -> None:
        """Set the bytes of `id`, even beyond the limit."""
        with self._lock:
            self._used += size - self._sizes.get(id, 0)
            self._sizes[id] = size

    def add(self, id: str, size: int) -> None:
        """Add `size` bytes to `id`. Errors: QuotaExceeded, which leaves the count unchanged."""
        with self._lock:
            if self.limit is not None and size > 0 and self._used + size > self.limit:
                raise QuotaExceeded(self.limit)
            self._used += size
            self._sizes[id] = self._sizes.get(id, 0) + size

    def remove(self, id: str) -> None:
        """Remove the bytes of `id` from the count."""
        with self._lock:
            self._used -= self._sizes.pop(id, 0)


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
