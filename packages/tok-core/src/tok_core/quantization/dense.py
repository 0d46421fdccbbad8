"""DenseMethod: unquantised weights, in the dtype of the activations."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tok_core.quantization.linear_method import LinearLayer, LinearMethod, MakeParameter
from tok_core.quantization.weight_target import WeightTarget


class DenseMethod(LinearMethod):
    """One matrix `weight` `[F, K]`, multiplied by the backend's GEMMs."""

    def create(self, layer: LinearLayer, make: MakeParameter, dtype: torch.dtype) -> None:
        rows = sum(part.count for part in layer.parts.values())
        layer.register_parameter("weight", make(rows, layer.inputs.count, dtype=dtype))

    def targets(self, layer: LinearLayer) -> Iterator[tuple[str, WeightTarget]]:
        counts = [part.count for part in layer.parts.values()]
        views = torch.split(layer.weight, counts)
        for (name, rows), view in zip(layer.parts.items(), views, strict=True):
            yield f"{name}.weight", WeightTarget(view, (rows, layer.inputs))

    def input_dtype(self, layer: LinearLayer) -> torch.dtype:
        return layer.weight.dtype

    def apply(
        self, layer: LinearLayer, x_TK: Tensor, norm: tuple[Tensor, float] | None, residual_TF: Tensor | None
    ) -> Tensor:
        weight_FK = layer.weight
        if layer.gated:
            return layer.backend.gated_linear(x_TK, weight_FK, layer.bias, norm=norm)
        return layer.backend.linear(x_TK, weight_FK, layer.bias, norm=norm, residual_TN=residual_TF)

    def matmul(self, layer: LinearLayer, x_TK: Tensor, bias_F: Tensor | None = None) -> Tensor:
        return layer.backend.linear(x_TK, layer.weight, bias_F)

    def matmul_into(self, layer: LinearLayer, x_TK: Tensor, out_TF: Tensor) -> None:
        torch.mm(x_TK, layer.weight.t(), out=out_TF)

    def fused_weight(self, layer: LinearLayer) -> Tensor:
        return layer.weight.t()

    def row_norms(self, layer: LinearLayer, gain_K: Tensor) -> Tensor:
        norms_F: Tensor = torch.linalg.vector_norm(layer.weight * gain_K.float(), dim=1)
        return norms_F
