"""A cascade level as prefill items: each group of rows is one, and so is each run of rows between groups.

FlashInfer's queries lie without a gap, so that rows in no group need an item too: one without keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tok_kernels.attention.flashinfer.pages import Ints
from tok_kernels.batch import HostLevel


@dataclass(frozen=True, slots=True)
class LevelItems:
    """`indptr` `[I + 1]` of the items' rows; `group` `[I]`: whose pages are read, 0 where none are; their positions
    `[start[i], end[i])`; `covered` bool `[rows]`: rows that some group gives keys."""

    indptr: Ints
    group: Ints
    start: Ints
    end: Ints
    covered: NDArray[np.bool_]


def level_items(level: HostLevel, rows: int) -> LevelItems:
    """The items of a level over the first `rows` decode rows."""
    used = np.flatnonzero((level.row_count > 0) & (level.kv_end > level.kv_start))
    first = level.row_start[used]
    bounds = np.unique(np.concatenate(([0, rows], first, first + level.row_count[used])))
    item = np.searchsorted(bounds, first)
    group, start, end = np.zeros((3, len(bounds) - 1), np.int32)
    group[item], start[item], end[item] = used, level.kv_start[used], level.kv_end[used]
    covered = np.repeat(end > start, np.diff(bounds))
    return LevelItems(bounds.astype(np.int32), group, start, end, covered)
