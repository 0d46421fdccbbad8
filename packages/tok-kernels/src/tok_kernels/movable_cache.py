"""Triton's cache of compiled kernels in a directory that may be moved: Triton notes the absolute paths of its files."""
# mypy: disable-error-code="import-untyped, misc"

from __future__ import annotations

import json

from triton.runtime.cache import FileCacheManager


class MovableCache(FileCacheManager):
    """Cache of one compiled kernel; its files are looked up where the cache is now. For TRITON_CACHE_MANAGER."""

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Return the paths of the files stored as group `filename`, by name; None if there is no such group."""
        group = self.get_file(f"__grp__{filename}")
        if group is None:
            return None
        with open(group, encoding="utf-8") as file:
            names = json.load(file)["child_paths"]
        return {name: path for name in names if (path := self.get_file(name)) is not None}
