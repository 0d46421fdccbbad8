"""Matrices of 8-bit numbers with scales: weights, and activations that a kernel has rounded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_VALUES = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""Largest number of each dtype of 8 bits."""


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """A weight `values · scale`: float8_e4m3fn or int8 `[N, K]`, and float32 `[N, G]`.

    group       consecutive columns that share a scale; None: all columns of a row, so that G is 1
    block_rows  consecutive rows, from the first on, whose scales are equal; 1: those of any two rows may differ
    """

    values_NK: Tensor
    scale_NG: Tensor
    group: int | None = None
    block_rows: int = 1

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weight in another dtype, `[N, K]`."""
        scale = self.scale_NG
        if self.group is not None:
            scale = scale.repeat_interleave(self.group, 1)[:, : self.values_NK.shape[1]]
        return (self.values_NK.float() * scale).to(dtype)


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Activations `values · scale`: float8_e4m3fn or int8 `[T, K]`, and float32 `[T, G]`, dense along T.

    The tensors may have more than `tokens` rows; the values of those are arbitrary. `dtype` is that of the activations
    before they were rounded, and of results of linear layers.
    """

    values_TK: Tensor
    scale_TG: Tensor
    tokens: int
    dtype: torch.dtype
