"""The layouts in which checkpoints store packed integers: compressed-tensors, AWQ and GPTQ.

Axes of stored tensors: N rows and K columns of a whole matrix, G groups of columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tok_core.parallel import Slice
from tok_core.quantization.linear_method import LinearLayer
from tok_core.quantization.packed_method import PackedMethod, pack
from tok_core.quantization.weight_target import SCALES, WeightTarget

INTEGERS = ("I32",)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight columns each four bits of a word hold, lowest bits first
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where each of eight columns is: the inverse


@dataclass(frozen=True)
class PackQuantizedMethod(PackedMethod):
    """compressed-tensors' "pack-quantized": `weight_packed [N, K / 8]`, zero points packed along N."""

    redundant = ("weight_shape",)

    def part_targets(
        self, layer: LinearLayer, rows: Slice, packed_FW: Tensor, scale_FG: Tensor, zero_FG: Tensor | None
    ) -> Iterator[tuple[str, WeightTarget]]:
        groups = self.groups(layer)

        def zeros(part: Tensor) -> Tensor:
            return self.unpacked(part.t(), rows).t()

        def weights(part: Tensor) -> Tensor:
            return self.repacked(part, packed_FW, partial(self.unpacked, axis=layer.inputs))

        yield "weight_packed", WeightTarget(packed_FW, (rows, self.words(layer.inputs)), INTEGERS, weights)
        yield "weight_scale", WeightTarget(scale_FG, (rows, groups), allowed=SCALES)
        if zero_FG is not None:
            yield "weight_zero_point", WeightTarget(zero_FG, (self.words(rows), groups), INTEGERS, zeros)

    def stored(self, q_FK: Tensor, scale_FG: Tensor, zero_FG: Tensor) -> dict[str, Tensor]:
        tensors = {"weight_packed": pack(q_FK, self.bits), "weight_scale": scale_FG}
        return tensors | ({"weight_zero_point": pack(zero_FG.t(), self.bits).t()} if self.zero_points else {})


@dataclass(frozen=True)
class GPTQMethod(PackedMethod):
    """GPTQ: `qweight [K / 8, N]`, packed along K; `qzeros [G, N / 8]`, packed along N.

    offset  is added to stored zero points: 1, or 0 in the format "gptq_v2"
    """

    zero_points: bool = True
    offset: int = 1
    redundant = ("g_idx",)  # unless columns name their groups

    @property
    def tensor_format(self) -> str:
        """Return `checkpoint_format` of a checkpoint in this layout."""
        return "gptq" if self.offset else "gptq_v2"

    def part_targets(
        self, layer: LinearLayer, rows: Slice, packed_FW: Tensor, scale_FG: Tensor, zero_FG: Tensor | None
    ) -> Iterator[tuple[str, WeightTarget]]:
        groups = self.groups(layer)

        def zeros(part: Tensor) -> Tensor:
            return (self.unpacked(part, rows) + self.offset).t()

        def weights(part: Tensor) -> Tensor:
            return self.repacked(part.t(), packed_FW, partial(self.unpacked, axis=layer.inputs))

        assert zero_FG is not None
        yield "qweight", WeightTarget(packed_FW, (self.words(layer.inputs), rows), INTEGERS, weights)
        yield "qzeros", WeightTarget(zero_FG, (groups, self.words(rows)), INTEGERS, zeros)
        yield "scales", WeightTarget(scale_FG, (groups, rows), convert=Tensor.t, allowed=SCALES)

    def stored(self, q_FK: Tensor, scale_FG: Tensor, zero_FG: Tensor) -> dict[str, Tensor]:
        return {
            "qweight": pack(q_FK, self.bits).t(),
            "qzeros": pack(zero_FG.t() - self.offset, self.bits),
            "scales": scale_FG.t(),
        }


@dataclass(frozen=True)
class AWQMethod(PackedMethod):
    """AWQ's "gemm": `qweight [K, N / 8]` and `qzeros [G, N / 8]`, both packed along N in AWQ_ORDER."""

    zero_points: bool = True

    def part_targets(
        self, layer: LinearLayer, rows: Slice, packed_FW: Tensor, scale_FG: Tensor, zero_FG: Tensor | None
    ) -> Iterator[tuple[str, WeightTarget]]:
        groups, words = self.groups(layer), self.words(rows)

        def values(part: Tensor) -> Tensor:
            return self.unpacked(part, rows, AWQ_PLACES).t()

        def weights(part: Tensor) -> Tensor:
            return self.repacked(part, packed_FW, values, axis=1)

        assert zero_FG is not None
        yield "qweight", WeightTarget(packed_FW, (layer.inputs, words), INTEGERS, weights)
        yield "qzeros", WeightTarget(zero_FG, (groups, words), INTEGERS, values)
        yield "scales", WeightTarget(scale_FG, (groups, rows), convert=Tensor.t, allowed=SCALES)

    def stored(self, q_FK: Tensor, scale_FG: Tensor, zero_FG: Tensor) -> dict[str, Tensor]:
        def packed(values: Tensor) -> Tensor:
            return pack(torch.unflatten(values.t(), 1, (-1, len(AWQ_ORDER)))[..., AWQ_ORDER].flatten(1), self.bits)

        return {"qweight": packed(q_FK), "qzeros": packed(zero_FG), "scales": scale_FG.t()}
