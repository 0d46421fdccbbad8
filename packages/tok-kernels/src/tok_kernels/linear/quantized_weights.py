"""Define quantised weights (8-bit values with scales, integers packed in words) and quantised activations.

Axes: N or F rows, K columns, G groups of columns, W words of a row, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

MAX_VALUES = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""Largest value of each 8-bit dtype."""

WORD_BITS = 32
CHUNK_WORDS = 4  # words that together hold consecutive columns
MAX_TILES = 1024  # entries of `PackedWeight.split_k_counters`


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """An 8-bit weight `values · scale`.

    values_NK   float8_e4m3fn or int8 [N, K]
    scale_NG    float32 [N, G]
    group       consecutive columns that share a scale; None: all columns of a row, so that G is 1 (channel-wise)
    block_rows  consecutive rows, counted from row 0, that have equal scales (block-wise); 1: all rows may differ
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

    def rows(self, rows: slice) -> ScaledWeight:
        """Return some rows of the weight, whose first row may lie within a block of rows."""
        return ScaledWeight(self.values_NK[rows], self.scale_NG[rows], self.group)


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Quantised activations `values · scale`.

    values_TK  float8_e4m3fn or int8 [T, K]
    scale_TG   float32 [T, G], contiguous along T
    tokens     number of valid rows; the tensors may have further rows of arbitrary values
    dtype      dtype of the activations before quantisation, and of the results of linear layers
    """

    values_TK: Tensor
    scale_TG: Tensor
    tokens: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight `(q - zero) * scale` of unsigned integers q of `bits` bits, packed in words (GPTQ, AWQ and others).

    words             int32 [F, W], made by `pack_columns`
    scale_GF          float32 [G, F]
    zero_GF           uint8 [G, F]; None: half of q's range (symmetric)
    columns           K; the last words are padded with zeros
    group             number of consecutive columns that share a scale; None: all
    dtype             dtype of activations, to which dequantised weights are rounded
    split_k_counters  int32 [MAX_TILES], number of programs that have finished each tile; 0 between kernels
    group_of_column   int32 [parts, K], the group of each column of each stacked matrix (`g_idx` of GPTQ); None: `group`
                      applies
    part_rows         number of rows of each stacked matrix
    """

    words: Tensor
    scale_GF: Tensor
    zero_GF: Tensor | None
    bits: int
    columns: int
    group: int | None
    dtype: torch.dtype
    split_k_counters: Tensor
    group_of_column: Tensor | None = None
    part_rows: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        """`(F, K)`."""
        return len(self.words), self.columns

    @property
    def symmetric_zero_point(self) -> int:
        """The zero point of a weight that stores none."""
        return 1 << (self.bits - 1)

    def dense(self) -> Tensor:
        """Return W `[F, K]`, computed in float32 and rounded to the dtype of activations."""
        q_FK = unpack_columns(self.words, self.bits)[:, : self.columns]
        zero = self.symmetric_zero_point if self.zero_GF is None else self._expand_groups(self.zero_GF.int())
        return ((q_FK - zero) * self._expand_groups(self.scale_GF)).to(self.dtype)

    def rows(self, rows: slice) -> PackedWeight:
        """Return the stacked matrices of a range of rows."""
        selected = self
        if self.group_of_column is not None:
            bounds = list(accumulate(self.part_rows, initial=0))
            parts = slice(bounds.index(rows.start), bounds.index(rows.stop))
            selected = replace(self, group_of_column=self.group_of_column[parts], part_rows=self.part_rows[parts])
        zero_GF = None if self.zero_GF is None else self.zero_GF[:, rows]
        return replace(selected, words=self.words[rows], scale_GF=self.scale_GF[:, rows], zero_GF=zero_GF)

    def _expand_groups(self, values_GF: Tensor) -> Tensor:
        """Expand values of groups to columns, `[F, K]`, or `[F, 1]` if all columns share a group."""
        if self.group_of_column is not None:
            parts = torch.split(values_GF, list(self.part_rows), 1)
            return torch.cat([part[group.long()].t() for part, group in zip(parts, self.group_of_column, strict=True)])
        if self.group is None:
            return values_GF.t()
        return values_GF.t().repeat_interleave(self.group, 1)[:, : self.columns]


def pack_columns(q: Tensor, bits: int) -> Tensor:
    """Pack unsigned int32 values along the last axis into int32 words, in the order in which tensor cores read them.

    Four words hold consecutive columns. Word c has column 8p + 2c from bit `bits · p` on, and column 8p + 2c + 1 from
    bit `16 + bits · p` on. With 4 bits p < 4, and word 0 holds columns 0, 8, 16, 24, 1, 9, 17, 25. So one mask
    extracts two neighbouring columns. The last four words are padded with zeros.
    """
    pairs = WORD_BITS // bits // 2
    padded = functional.pad(q, (0, -q.shape[-1] % (CHUNK_WORDS * 2 * pairs)))
    parts = torch.unflatten(padded, -1, (-1, pairs, CHUNK_WORDS, 2)).transpose(-3, -2)
    return (parts << _shifts(bits, q.device)).sum((-2, -1), dtype=torch.int32).flatten(-2)


def unpack_columns(words: Tensor, bits: int) -> Tensor:
    """Unpack words of `pack_columns` into int32 values."""
    parts = torch.unflatten(words, -1, (-1, CHUNK_WORDS))[..., None, None] >> _shifts(bits, words.device)
    return (parts & ((1 << bits) - 1)).transpose(-3, -2).flatten(-4)


def _shifts(bits: int, device: torch.device) -> Tensor:
    """Return the first bit of each value of a word, `[pairs, 2]`."""
    pair = torch.arange(0, 16, bits, dtype=torch.int32, device=device)
    return torch.stack([pair, pair + 16], 1)
