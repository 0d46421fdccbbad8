"""ScaledMethod: weights of 8 bits with float32 scales, for each row, matrix or block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tok_core.parallel import Slice
from tok_core.quantization.linear_method import LinearLayer, LinearMethod, MakeParameter
from tok_core.quantization.scales import blocks_of, column_groups, for_columns, in_groups
from tok_core.quantization.weight_target import POSITIVE_SCALES, SCALES, WeightTarget
from tok_kernels import MAX_VALUES, KVWrite, ScaledWeight

STORED_DTYPES = {torch.float8_e4m3fn: "F8_E4M3", torch.int8: "I8"}  # as safetensors names them


@dataclass(frozen=True)
class ScaledMethod(LinearMethod):
    """Weights in float8 (e4m3) or int8, with a float32 scale for each row and group of columns.

    block       rows and columns of the blocks that share a scale in a checkpoint; None: each row has one
    per_tensor  a checkpoint has one scale for each matrix, shared by all its rows
    scale_name  end of the names of scales in a checkpoint
    redundant   scales of inputs: a backend that rounds inputs computes its own
    """

    dtype: torch.dtype
    block: tuple[int, int] | None = None
    per_tensor: bool = False
    scale_name: str = "weight_scale"
    redundant: tuple[str, ...] = ()

    def __str__(self) -> str:
        sharing = (
            "matrix" if self.per_tensor else "row" if self.block is None else "block of {} × {}".format(*self.block)
        )
        return f"{'float8' if self.dtype.is_floating_point else 'int8'} with a scale for each {sharing}"

    def create(self, layer: LinearLayer, make: MakeParameter) -> None:
        rows = sum(part.count for part in layer.parts.values())
        layer.register_parameter("weight", make(rows, layer.inputs.count, dtype=self.dtype))
        layer.register_parameter("weight_scale", make(rows, self._groups(layer).count, dtype=torch.float32))

    def targets(self, layer: LinearLayer) -> Iterator[tuple[str, WeightTarget]]:
        counts = [rows.count for rows in layer.parts.values()]
        weights, scales = (torch.split(layer.get_parameter(name), counts) for name in ("weight", "weight_scale"))
        for (name, rows), weight, scale in zip(layer.parts.items(), weights, scales, strict=True):
            yield f"{name}.weight", WeightTarget(weight, (rows, layer.inputs), (STORED_DTYPES[self.dtype],))
            yield f"{name}.{self.scale_name}", self._scale_target(layer, rows, scale)

    def _scale_target(self, layer: LinearLayer, rows: Slice, scale_FG: Tensor) -> WeightTarget:
        allowed = POSITIVE_SCALES if self.dtype.is_floating_point else SCALES
        if self.per_tensor:
            return WeightTarget(scale_FG, (), allowed=allowed)
        if self.block is None:
            return WeightTarget(scale_FG, (rows, Slice.whole(1)), allowed=allowed)
        size = self.block[0]
        first = rows.start % size  # of the first block's rows, the first that this rank holds

        def of_rows(part: Tensor) -> Tensor:
            return part.repeat_interleave(size, 0)[first : first + rows.count]

        return WeightTarget(scale_FG, (blocks_of(rows, size), self._groups(layer)), convert=of_rows, allowed=allowed)

    def dense_weight(self, layer: LinearLayer) -> Tensor:
        return self._scaled(layer).dense(layer.dtype)

    def _scaled(self, layer: LinearLayer) -> ScaledWeight:
        block_rows = 1
        if self.block is not None and not any(edge % self.block[0] for edge in self._edges(layer)):
            block_rows = self.block[0]
        return ScaledWeight(layer.weight, layer.get_parameter("weight_scale"), self._columns, block_rows)

    @staticmethod
    def _edges(layer: LinearLayer) -> Iterator[int]:
        """Yield the rows at which this rank's part of a matrix begins and ends."""
        for rows in layer.parts.values():
            yield rows.start
            yield rows.stop

    def apply(
        self, layer: LinearLayer, x_TK: Tensor, norm: tuple[Tensor, float] | None, residual_TF: Tensor | None
    ) -> Tensor:
        weight, backend = self._scaled(layer), layer.backend
        if not layer.gated:
            return backend.scaled_linear(x_TK, weight, layer.bias, norm=norm, residual_TN=residual_TF)
        out_TG = backend.scaled_gated_linear(x_TK, weight, layer.bias, norm=norm)
        assert isinstance(out_TG, Tensor), "quantised only for `down`"
        return out_TG

    def project_and_write_kv(
        self, layer: LinearLayer, x_TK: Tensor, norm: tuple[Tensor, float] | None, write: KVWrite
    ) -> Tensor:
        return layer.backend.scaled_project_and_write_kv(x_TK, self._scaled(layer), layer.bias, write, norm=norm)

    def mlp(
        self,
        gate_up: LinearLayer,
        down: LinearLayer,
        x_TK: Tensor,
        norm: tuple[Tensor, float] | None,
        residual_TF: Tensor | None,
    ) -> Tensor:
        method = down.method
        if not isinstance(method, ScaledMethod) or method.dtype != self.dtype:
            return super().mlp(gate_up, down, x_TK, norm, residual_TF)
        weight, backend = method._scaled(down), gate_up.backend
        rows = backend.scaled_gated_linear(x_TK, self._scaled(gate_up), gate_up.bias, norm=norm, down=weight)
        return backend.scaled_linear(rows, weight, down.bias, residual_TN=residual_TF)

    def operand(self, layer: LinearLayer) -> ScaledWeight:
        return self._scaled(layer)

    def matmul(self, layer: LinearLayer, x_TK: Tensor, bias_F: Tensor | None = None) -> Tensor:
        return layer.backend.scaled_linear(x_TK, self._scaled(layer), bias_F)

    def matmul_into(self, layer: LinearLayer, x_TK: Tensor, out_TF: Tensor) -> None:
        out_TF.copy_(self.matmul(layer, x_TK))

    def quantize(self, weight_FK: Tensor) -> dict[str, Tensor]:
        """Round to the nearest. A scale maps the largest weight of its group to the largest value of the dtype."""
        limit, (rows, columns) = MAX_VALUES[self.dtype], weight_FK.shape
        divisor = torch.full((), limit, device=weight_FK.device)  # a GPU would multiply by the reciprocal of a number
        stored = in_groups(weight_FK.float().abs(), self._columns).amax(2) / divisor
        if self.per_tensor:
            stored = stored.amax()
        elif self.block is not None:
            stored = in_groups(stored.t(), self.block[0]).amax(2).t()
        stored = torch.where(stored == 0, 1, stored)
        scale_FG = stored.expand(rows, 1) if self.per_tensor else stored
        if self.block is not None:
            scale_FG = stored.repeat_interleave(self.block[0], 0)[:rows]
        divided_FK = (weight_FK.float() / for_columns(scale_FG, self._columns, columns)).clamp(-limit, limit)
        rounded_FK = divided_FK if self.dtype.is_floating_point else divided_FK.round()
        return {"weight": rounded_FK.to(self.dtype), self.scale_name: stored}

    @property
    def rows_independent(self) -> bool:
        return self.block is None and not self.per_tensor

    @property
    def _columns(self) -> int | None:
        """Number of columns that share a scale; None: all."""
        return None if self.block is None else self.block[1]

    def _groups(self, layer: LinearLayer) -> Slice:
        return column_groups(layer.inputs, self._columns, ", ".join(layer.parts))
