"""One process a data directory: a lock that ends with its process, however that ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from tok_server.batch.storage.database import StoreError


class FileLock:
    """Holds `path`, a file made for it, until closed. Errors: StoreError, naming the process that holds it."""

    def __init__(self, path: Path, what: str) -> None:
        self._descriptor = _locked(path, what)
        # Its holder may delete the file at the end: a lock on one that no path leads to keeps nobody out.
        while not _is_at(self._descriptor, path):
            os.close(self._descriptor)
            self._descriptor = _locked(path, what)
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, b"%d\n" % os.getpid())

    def close(self) -> None:
        """Lets go. The file stays: another process may be waiting for this very one."""
        os.close(self._descriptor)


def _locked(path: Path, what: str) -> int:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreError(f"{path}: cannot be opened: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise StoreError(f"{what} is in use by another tok (process {holder})") from error
    return descriptor


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
