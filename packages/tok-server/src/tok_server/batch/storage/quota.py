"""Quota: limit the bytes of all files and answers of a data directory."""

from __future__ import annotations

import errno
import threading


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
