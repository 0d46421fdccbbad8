"""Describe a cascade level as prefill items: one for each group of rows, and one for each run of rows between groups.

FlashInfer's queries must be contiguous, so rows in no group need an item, too: one without keys. For example, take 6
rows and groups of the rows 1–2 and 4. The items are the rows 0, 1–2, 3, 4 and 5; items 0, 2 and 4 have no keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tok_kernels.attention.flashinfer.pages import Ints
from tok_kernels.batch import HostLevel


@dataclass(frozen=True, slots=True)
class LevelItems:
    """The I items of a level.

    indptr      [I + 1]      first row of each item, and the end of the last
    group       [I]          group whose pages are read; 0 if none
    start, end  [I]          positions `[start[i], end[i])` that the item reads; empty if none
    covered     bool [rows]  rows that receive keys from some group
    """

    indptr: Ints
    group: Ints
    start: Ints
    end: Ints
    covered: NDArray[np.bool_]


def level_items(level: HostLevel, rows: int) -> LevelItems:
    """Return the items of a level over the first `rows` decode rows."""
    used = np.flatnonzero((level.row_count > 0) & (level.kv_end > level.kv_start))
    first = level.row_start[used]
    bounds = np.unique(np.concatenate(([0, rows], first, first + level.row_count[used])))
    item = np.searchsorted(bounds, first)
    group, start, end = np.zeros((3, len(bounds) - 1), np.int32)
    group[item], start[item], end[item] = used, level.kv_start[used], level.kv_end[used]
    covered = np.repeat(end > start, np.diff(bounds))
    return LevelItems(bounds.astype(np.int32), group, start, end, covered)
