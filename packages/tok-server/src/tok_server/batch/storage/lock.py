"""FileLock: let one process at a time use a data directory; the lock ends with its process."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from tok_server.batch.storage.database import StoreError


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
