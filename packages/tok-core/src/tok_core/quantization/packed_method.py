"""PackedMethod: integer weights of 4 or 8 bits, packed in words of 32.

Axes: F rows of this rank, K columns of this rank, G groups of columns, W words of a row.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from tok_core.parallel import Slice
from tok_core.quantization.linear_method import LinearLayer, LinearMethod, MakeParameter
from tok_core.quantization.scales import column_groups, for_columns, in_groups
from tok_core.quantization.weight_target import AllowedRange, WeightTarget
from tok_kernels import MAX_TILES, PackedWeight, pack_columns

WORD_BITS = 32
MAX_UNPACKED_WEIGHTS = 1 << 26  # unpacked at once while loading; bounds the memory
BLOCK_COLUMNS = 32  # columns in four words of 4-bit weights, which `pack_columns` interleaves


@dataclass(frozen=True)
class PackedMethod(LinearMethod):
    """Unsigned integers q of `bits` bits, which stand for the weights `(q - zero_point) · scale`.

    group        number of consecutive columns that share scale and zero point; None: all
    zero_points  a checkpoint stores zero points; else all are half of q's range
    act_order    each column names its group (GPTQ's `g_idx`), so that a group's columns need not be consecutive

    The parameter `weight_packed`, int32 `[F, W]`, has the layout of `tok_kernels.PackedWeight`; scales and zero points
    are `[G, F]`.
    """

    bits: int = 4
    group: int | None = 128
    zero_points: bool = False
    act_order: bool = False

    def __str__(self) -> str:
        shared = "a scale and a zero point" if self.zero_points else "a scale"
        return f"int{self.bits} with {shared} for each " + (f"{self.group} columns" if self.group else "row")

    @abstractmethod
    def part_targets(
        self, layer: LinearLayer, rows: Slice, packed_FW: Tensor, scale_FG: Tensor, zero_FG: Tensor | None
    ) -> Iterator[tuple[str, WeightTarget]]:
        """Yield the ends of the names of one matrix's tensors, and what each fills."""

    @abstractmethod
    def stored(self, q_FK: Tensor, scale_FG: Tensor, zero_FG: Tensor) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint, by the ends of their names, for int32 q and zero points."""

    @property
    def per_word(self) -> int:
        """Number of weights in a word."""
        return WORD_BITS // self.bits

    def words(self, axis: Slice) -> Slice:
        """Return the range of words that hold the entries of `axis`, packed along it."""
        return Slice(axis.start // self.per_word, -(-axis.stop // self.per_word), -(-axis.size // self.per_word))

    def unpacked(self, words: Tensor, axis: Slice, order: Sequence[int] | None = None) -> Tensor:
        """Unpack the words of `self.words(axis)` along the last axis, and return the entries of `axis`.

        order  place in a word of each of its entries; None: lowest bits first
        """
        values = unpack(words, self.bits)
        if order is not None:
            values = torch.unflatten(values, -1, (-1, self.per_word))[..., order].flatten(-2)
        first = axis.start % self.per_word
        return values[..., first : first + axis.count]

    def repacked(self, part: Tensor, packed_FW: Tensor, unpacked: Callable[[Tensor], Tensor], axis: int = 0) -> Tensor:
        """Return words for the parameter `packed_FW`, converted on its device in blocks, which bounds the memory.

        unpacked  returns q `[rows, columns]` of a block of `part`, whose first axis is F, or K with `axis` 1
        """
        block = self.per_word * BLOCK_COLUMNS
        size = max(1, MAX_UNPACKED_WEIGHTS // (part.shape[1] * block)) * BLOCK_COLUMNS
        blocks = (unpacked(block.to(packed_FW.device)) for block in torch.split(part, size))
        return torch.cat([pack_columns(q_FK, self.bits) for q_FK in blocks], axis)

    def groups(self, layer: LinearLayer) -> Slice:
        """Return the range of groups whose scales a rank needs: those of its columns, or all if columns name them."""
        if self.act_order:
            return Slice.whole(-(-layer.inputs.size // (self.group or layer.inputs.size)))
        return column_groups(layer.inputs, self.group, ", ".join(layer.parts))

    def create(self, layer: LinearLayer, make: MakeParameter) -> None:
        rows, groups = sum(part.count for part in layer.parts.values()), self.groups(layer).count
        words = pack_columns(torch.empty((1, layer.inputs.count), dtype=torch.int32, device="meta"), self.bits)
        layer.register_parameter("weight_packed", make(rows, words.shape[1], dtype=torch.int32))
        layer.register_parameter("weight_scale", make(groups, rows, dtype=torch.float32))
        if self.zero_points:
            layer.register_parameter("weight_zero_point", make(groups, rows, dtype=torch.uint8))
        if self.act_order:
            layer.register_parameter("group_of_column", make(len(layer.parts), layer.inputs.count, dtype=torch.int32))
        device = layer.get_parameter("weight_packed").device
        counters = torch.zeros(MAX_TILES, dtype=torch.int32, device=device)
        layer.register_buffer("split_k_counters", counters, persistent=False)

    def targets(self, layer: LinearLayer) -> Iterator[tuple[str, WeightTarget]]:
        counts = [rows.count for rows in layer.parts.values()]
        packed = torch.split(layer.get_parameter("weight_packed"), counts)
        scales = torch.split(layer.get_parameter("weight_scale").t(), counts)
        zeros: tuple[Tensor | None, ...] = (None,) * len(counts)
        if self.zero_points:
            zeros = torch.split(layer.get_parameter("weight_zero_point").t(), counts)
        for (name, rows), packed_FW, scale_FG, zero_FG in zip(layer.parts.items(), packed, scales, zeros, strict=True):
            for end, target in self.part_targets(layer, rows, packed_FW, scale_FG, zero_FG):
                yield f"{name}.{end}", target
        if self.act_order:
            last = self.groups(layer).size - 1
            allowed = AllowedRange(0, last, f"integers from 0 to {last}, the last group of columns")
            for name, group_K in zip(layer.parts, layer.get_parameter("group_of_column"), strict=True):
                yield f"{name}.g_idx", WeightTarget(group_K, (layer.inputs,), ("I32",), allowed=allowed)

    def dense_weight(self, layer: LinearLayer) -> Tensor:
        return layer.backend.dequantize(self._packed(layer))

    def apply(
        self, layer: LinearLayer, x_TK: Tensor, norm: tuple[Tensor, float] | None, residual_TF: Tensor | None
    ) -> Tensor:
        weight, backend = self._packed(layer), layer.backend
        if layer.gated:
            return backend.packed_gated_linear(x_TK, weight, layer.bias, norm=norm)
        return backend.packed_linear(x_TK, weight, layer.bias, norm=norm, residual_TN=residual_TF)

    def operand(self, layer: LinearLayer) -> PackedWeight:
        return self._packed(layer)

    def matmul(self, layer: LinearLayer, x_TK: Tensor, bias_F: Tensor | None = None) -> Tensor:
        return layer.backend.packed_linear(x_TK, self._packed(layer), bias_F)

    def _packed(self, layer: LinearLayer) -> PackedWeight:
        return PackedWeight(
            words=layer.get_parameter("weight_packed"),
            scale_GF=layer.get_parameter("weight_scale"),
            zero_GF=layer.get_parameter("weight_zero_point") if self.zero_points else None,
            bits=self.bits,
            columns=layer.inputs.count,
            group=self.group,
            dtype=layer.dtype,
            split_k_counters=layer.get_buffer("split_k_counters"),
            group_of_column=layer.get_parameter("group_of_column") if self.act_order else None,
            part_rows=tuple(rows.count for rows in layer.parts.values()),
        )

    @property
    def symmetric_zero_point(self) -> int:
        """Zero point of formats that store none: half of q's range."""
        return 1 << (self.bits - 1)

    def quantize(self, weight_FK: Tensor) -> dict[str, Tensor]:
        """Round to the nearest. Zero points, if the format stores them, let each group use q's whole range."""
        limit, groups_FGK = (1 << self.bits) - 1, in_groups(weight_FK.float(), self.group)
        if self.zero_points:
            low_FG, high_FG = groups_FGK.amin(2).clamp(max=0), groups_FGK.amax(2).clamp(min=0)
            scale_FG = (high_FG - low_FG) / limit
        else:
            scale_FG = groups_FGK.abs().amax(2) * 2 / limit
        scale_FG = torch.where(scale_FG == 0, 1, scale_FG)
        zero_FG = torch.full_like(scale_FG, self.symmetric_zero_point)
        if self.zero_points:
            zero_FG = (-low_FG / scale_FG).round()
        columns = weight_FK.shape[1]
        scale, zero = (for_columns(values, self.group, columns) for values in (scale_FG, zero_FG))
        q_FK = (weight_FK.float() / scale + zero).round().clamp(0, limit)
        tensors = self.stored(q_FK.int(), scale_FG, zero_FG.int())
        if self.act_order:
            tensors["g_idx"] = torch.arange(columns, dtype=torch.int32) // (self.group or columns)
        return tensors


def pack(values: Tensor, bits: int) -> Tensor:
    """Pack unsigned int32 values along the last axis into int32 words, lowest bits first; zeros fill the last word."""
    per_word = WORD_BITS // bits
    padded = torch.unflatten(functional.pad(values, (0, -values.shape[-1] % per_word)), -1, (-1, per_word))
    shift = torch.arange(0, WORD_BITS, bits, dtype=torch.int32, device=values.device)
    return (padded << shift).sum(-1, dtype=torch.int32)


def unpack(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 words along the last axis into unsigned int32 values."""
    shift = torch.arange(0, WORD_BITS, bits, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shift) & ((1 << bits) - 1)).flatten(-2)
