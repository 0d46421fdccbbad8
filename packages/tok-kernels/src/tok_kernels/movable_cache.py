"""Define `MovableCache`, a cache of compiled kernels whose directory may be moved.

Triton's own cache stores absolute paths of its files, which become wrong when the directory is moved or mounted
elsewhere. `TRITON_CACHE_MANAGER=tok_kernels.movable_cache:MovableCache` selects this one.
"""
# mypy: disable-error-code="import-untyped, misc"

from __future__ import annotations

import json

from triton.runtime.cache import FileCacheManager


class MovableCache(FileCacheManager):
    """Files of one compiled kernel, looked up in the directory where the cache is now."""

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Return the paths of the files stored as group `filename`, by name; None if there is no such group."""
        group_file = self.get_file(f"__grp__{filename}")
        if group_file is None:
            return None
        with open(group_file, encoding="utf-8") as file:
            names = json.load(file)["child_paths"]
        return {name: path for name in names if (path := self.get_file(name)) is not None}
