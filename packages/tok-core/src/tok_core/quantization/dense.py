"""DenseMethod: weights in the dtype of the activations."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tok_core.quantization.linear_method import FillTarget, LinearLayer, LinearMethod, MakeParameter
from tok_core.quantization.weight_target import WeightTarget
from tok_kernels import KVWrite


class DenseMethod(LinearMethod):
    """Unquantised weights: one parameter `weight`, `[F, K]`."""

    def __str__(self) -> str:
        return "dense"

    def create(self, layer: LinearLayer, make: MakeParameter) -> None:
        rows = sum(part.count for part in layer.parts.values())
        layer.register_parameter("weight", make(rows, layer.inputs.count, dtype=layer.dtype))

    def targets(self, layer: LinearLayer) -> Iterator[tuple[str, WeightTarget]]:
        counts = [part.count for part in layer.parts.values()]
        views = torch.split(layer.weight, counts)
        for (name, rows), view in zip(layer.parts.items(), views, strict=True):
            yield f"{name}.weight", WeightTarget(view, (rows, layer.inputs))

    def dense_weight(self, layer: LinearLayer) -> Tensor:
        return layer.weight

    def project_and_write_kv(
        self, layer: LinearLayer, x_TK: Tensor, norm: tuple[Tensor, float] | None, write: KVWrite
    ) -> Tensor:
        return layer.backend.project_and_write_kv(x_TK, layer.weight, layer.bias, write, norm=norm)

    def quantize(self, weight_FK: Tensor) -> dict[str, Tensor]:
        return {"weight": weight_FK}

    def dense_targets(self, layer: LinearLayer) -> Iterator[tuple[str, WeightTarget]]:
        return self.targets(layer)

    def fill_dense(self, layer: LinearLayer, fill: FillTarget) -> None:
        """Fill the parameters in place, without a copy of the whole matrix."""
        for name, target in self.targets(layer):
            fill(name, target)


DENSE = DenseMethod()
