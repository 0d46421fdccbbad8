"""Divide scales that several columns share among ranks, and expand them to columns.

Axes: F rows, K columns, G groups of consecutive columns.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tok_core.errors import ModelError
from tok_core.parallel import Slice


def blocks_of(axis: Slice, size: int) -> Slice:
    """Return the range of blocks of `size` entries that the range `axis` touches."""
    return Slice(axis.start // size, -(-axis.stop // size), -(-axis.size // size))


def column_groups(columns: Slice, size: int | None, names: str) -> Slice:
    """Return the range of groups that a rank's columns are divided into; None: one group of all columns.

    Raises ModelError, which names the matrices, if the rank's columns end within a group.
    """
    if size is None:
        return Slice.whole(1)
    if columns.start % size or (columns.stop % size and columns.stop != columns.size):
        raise ModelError(
            f"{names}: groups of {size} columns share a scale, and tensor parallelism cuts the {columns.size} columns "
            f"at {columns.start} and {columns.stop}; allowed: a number of ranks that divides {columns.size // size}"
        )
    return blocks_of(columns, size)


def for_columns(scale_FG: Tensor, size: int | None, columns: int) -> Tensor:
    """Return the scale of each column: `[F, K]`, or `[F, 1]` if all columns share it (`size` None)."""
    return scale_FG if size is None else scale_FG.repeat_interleave(size, 1)[:, :columns]


def in_groups(weight_FK: Tensor, size: int | None) -> Tensor:
    """Return the weights of each group, `[F, G, size]`; zeros fill the last group."""
    columns = weight_FK.shape[1]
    size = size or columns
    return torch.unflatten(functional.pad(weight_FK, (0, -columns % size)), 1, (-1, size))
