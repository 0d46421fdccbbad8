"""Quota: how many bytes the files and answers of a data directory may have together."""

from __future__ import annotations

import errno
import threading


class QuotaExceeded(OSError):
    """The data directory holds as much as it may."""

    def __init__(self, limit: int) -> None:
        super().__init__(errno.EDQUOT, f"the data directory has reached its quota of {limit} bytes")


class Quota:
    """Bytes by file or batch id. For any thread.

    limit  bytes; None: any number
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._sizes: dict[str, int] = {}
        self._used = 0
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        """Bytes of all together."""
        return self._used

    def put(self, id: str, size: int) -> None:
        """Set what `id` holds, whether or not there is room for it."""
        with self._lock:
            self._used += size - self._sizes.get(id, 0)
            self._sizes[id] = size

    def add(self, id: str, size: int) -> None:
        """Count so many bytes more of `id`. Errors: QuotaExceeded, and nothing is counted."""
        with self._lock:
            if self.limit is not None and size > 0 and self._used + size > self.limit:
                raise QuotaExceeded(self.limit)
            self._used += size
            self._sizes[id] = self._sizes.get(id, 0) + size

    def remove(self, id: str) -> None:
        """Count nothing of `id` any more."""
        with self._lock:
            self._used -= self._sizes.pop(id, 0)
