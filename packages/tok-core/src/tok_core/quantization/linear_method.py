"""LinearMethod: how linear layers store their weights, fill them from a checkpoint, and multiply by them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from tok_core.parallel import Slice
from tok_core.quantization.weight_target import OnlineQuantizationTarget, WeightTarget
from tok_kernels import Backend, KVWrite, PackedWeight, ScaledWeight, write_qkv

MakeParameter = Callable[..., nn.Parameter]
"""Makes an uninitialised parameter of a shape; the keyword `dtype` replaces the model's dtype."""
FillTarget = Callable[[str, WeightTarget], None]
"""Writes the values of the tensor of a name in a dense checkpoint to its target."""


class LinearLayer(Protocol):
    """The part of `tok_core.models.Linear` that methods use.

    dtype   of activations
    inputs  range of columns that this rank holds
    parts   name of each stacked matrix in a checkpoint, and the range of its rows that this rank holds
    gated   the layer returns `silu(gate) · up` of its two matrices' results
    method  how the weight is stored
    weight  the parameter that `create` registered under this name
    bias    `[F]`; None: no bias
    """

    backend: Backend
    dtype: torch.dtype
    inputs: Slice
    parts: dict[str, Slice]
    gated: bool
    method: LinearMethod
    weight: nn.Parameter
    bias: nn.Parameter | None

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None: ...

    def get_parameter(self, target: str) -> nn.Parameter: ...

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None: ...

    def get_buffer(self, target: str) -> Tensor: ...


class LinearMethod(ABC):
    """How a linear layer stores its weight, fills it from a checkpoint, shards it, and multiplies by it.

    A method holds no state: parameters belong to the layer, and no other code reads them. By default a method
    multiplies by `dense_weight`; one with GEMMs of its own overrides `apply`, `matmul` and `matmul_into`, and `mlp` if
    it rounds activations.
    `redundant` lists ends of names ("weight_shape") of a layer's tensors that loading skips.
    Axes: T tokens, K inputs of this rank, F outputs of this rank (all stacked matrices), G outputs after the gate.
    """

    redundant: tuple[str, ...] = ()

    @abstractmethod
    def create(self, layer: LinearLayer, make: MakeParameter) -> None:
        """Register the layer's parameters except for its bias, uninitialised."""

    @abstractmethod
    def targets(self, layer: LinearLayer) -> Iterator[tuple[str, WeightTarget]]:
        """Yield the names of the layer's tensors in a checkpoint, such as "q_proj.weight", and what each fills."""

    @abstractmethod
    def dense_weight(self, layer: LinearLayer) -> Tensor:
        """Return W `[F, K]`, dequantised to the dtype of activations."""

    @abstractmethod
    def quantize(self, weight_FK: Tensor) -> dict[str, Tensor]:
        """Return the tensors that hold a whole matrix in a checkpoint, by the ends of their names ("weight_scale")."""

    @property
    def rows_independent(self) -> bool:
        """Whether `quantize` rounds each row independently of others, into tensors with an entry for each row."""
        return False

    def dense_targets(self, layer: LinearLayer) -> Iterator[tuple[str, WeightTarget]]:
        """Yield the names of the layer's matrices in a dense checkpoint, and targets that quantise them."""
        targets = dict(self.targets(layer))
        for name, rows in layer.parts.items():
            start = f"{name}."
            tensors = {full.removeprefix(start): target for full, target in targets.items() if full.startswith(start)}
            yield (
                f"{name}.weight",
                OnlineQuantizationTarget(
                    view=next(iter(tensors.values())).view,
                    parts=(rows if self.rows_independent else Slice.whole(rows.size), Slice.whole(layer.inputs.size)),
                    quantize=self.quantize,
                    tensors=tensors,
                    rows_independent=self.rows_independent,
                ),
            )

    def fill_dense(self, layer: LinearLayer, fill: FillTarget) -> None:
        """Fill the layer's parameters with dense matrices, which `fill` writes and this method quantises."""
        for name, target in self.dense_targets(layer):
            sizes = [part.count for part in target.parts]
            dense = WeightTarget(torch.empty(sizes, dtype=layer.dtype, device=target.view.device), target.parts)
            fill(name, dense)
            target.fill(dense.view)

    def apply(
        self, layer: LinearLayer, x_TK: Tensor, norm: tuple[Tensor, float] | None, residual_TF: Tensor | None
    ) -> Tensor:
        """Return the layer's result `[T, G]`, with norm before, bias and gate, or added to the residual in place."""
        weight_FK = self.dense_weight(layer)
        if layer.gated:
            return layer.backend.gated_linear(x_TK, weight_FK, layer.bias, norm=norm)
        return layer.backend.linear(x_TK, weight_FK, layer.bias, norm=norm, residual_TN=residual_TF)

    def mlp(
        self,
        gate_up: LinearLayer,
        down: LinearLayer,
        x_TK: Tensor,
        norm: tuple[Tensor, float] | None,
        residual_TF: Tensor | None,
    ) -> Tensor:
        """Apply `gate_up`, a layer of this method, then `down`; a method may round what `down` reads in one pass."""
        return down.method.apply(down, self.apply(gate_up, x_TK, norm, None), None, residual_TF)

    def project_and_write_kv(
        self, layer: LinearLayer, x_TK: Tensor, norm: tuple[Tensor, float] | None, write: KVWrite
    ) -> Tensor:
        """Apply a QKV projection, then `Backend.rope_and_write_kv`; return the rotated queries, `[T, H, D]`."""
        return write_qkv(layer.backend.rope_and_write_kv, self.apply(layer, x_TK, norm, None), write)

    def operand(self, layer: LinearLayer) -> Tensor | ScaledWeight | PackedWeight:
        """Return the weight as an operand of `Backend.fused_experts`; by default dequantised."""
        return self.dense_weight(layer)

    def matmul(self, layer: LinearLayer, x_TK: Tensor, bias_F: Tensor | None = None) -> Tensor:
        """Return `x Wᵀ + bias`, `[T, F]`, without the layer's own bias and gate."""
        return layer.backend.linear(x_TK, self.dense_weight(layer), bias_F)

    def matmul_into(self, layer: LinearLayer, x_TK: Tensor, out_TF: Tensor) -> None:
        """Write `x Wᵀ` to `out_TF`."""
        torch.mm(x_TK, self.dense_weight(layer).t(), out=out_TF)
