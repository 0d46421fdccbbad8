"""Implement the building blocks of a decoder, whole or as one tensor-parallel rank's shard.

Axes: T tokens of the step, N hidden size, F intermediate size, H query heads, K key/value heads, D head size,
V vocabulary, L positions. With tensor parallelism F, H, K and V count only the rank's own part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from tok_core.model_config import ModelConfig
from tok_core.parallel import ShardPlan, Slice
from tok_core.quantization import KV_SCALES, FillTarget, QuantizationConfig, WeightTarget
from tok_kernels import AttentionBatch, Backend, KVWrite, LayerCache, QKNorm, write_qkv

if TYPE_CHECKING:
    from tok_core.parallel import TensorParallel, TPLayout


Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Allocates a tensor of a shape and dtype."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Build options of a module: backend, device, dtype, shard plan, weight formats and name.

    tensor        connects the ranks of a stage; None: the stage has one
    quantization  weight format of each linear layer
    allocate      allocates parameters; None: PyTorch does, on `device`
    prefix        start of the names of the module's tensors in a checkpoint ("model.layers.3.mlp.")
    """

    backend: Backend
    device: torch.device
    dtype: torch.dtype
    shard_plan: ShardPlan
    tensor: TensorParallel | None = None
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    allocate: Allocate | None = None
    prefix: str = ""

    def within(self, name: str) -> Placement:
        """Return the placement of the submodule `name`."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """Return an uninitialised parameter without gradient, of `dtype` or else of the model's dtype."""
        dtype = dtype or self.dtype
        empty = (
            torch.empty(shape, device=self.device, dtype=dtype)
            if self.allocate is None
            else self.allocate(shape, dtype)
        )
        return nn.Parameter(empty, requires_grad=False)


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Inputs that all layers of one forward pass share.

    rope_row_T   rows of `cos_sin_LD` for each token, int64
    kv_index_T   flat cache rows to write, int64
    batch        attention inputs of the step
    layout       tensor-parallel layout; None without tensor parallelism
    hidden_TN    hidden states of another model for each token, which only a draft head reads
    """

    rope_row_T: Tensor
    kv_index_T: Tensor
    batch: AttentionBatch
    cos_sin_LD: Tensor
    layout: TPLayout | None = None
    hidden_TN: Tensor | None = None


class RMSNorm(nn.Module):
    """RMS norm `x / rms(x) · weight` over the last axis; the next linear layer computes it where possible."""

    def __init__(self, size: int, eps: float, placement: Placement) -> None:
        super().__init__()
        self.backend = placement.backend
        self.weight = placement.parameter(size)
        self.eps = eps

    def forward(self, x_TN: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return self.backend.rms_norm(x_TN, self.weight, self.eps, dtype)


class Linear(nn.Module):
    """Linear layer `x Wᵀ + b`; several matrices are stacked by rows, so that one GEMM computes all of them.

    parts   name of each matrix in a checkpoint, and the range of its rows that this rank holds
    inputs  range of columns that this rank holds
    gated   return `silu(gate) · up` of the two matrices' results
    fp16    use float16 instead of bfloat16 for inputs, outputs and dense weights: eight times the precision, for
            results that are rounded to bfloat16 later. Loading weights checks the range:
            `tok_core.models.weights.float16`
    method  how weights are stored and multiplied, as `Placement.quantization` chooses by the parts' names
    dtype   of inputs and outputs
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        inputs: Slice,
        parts: Mapping[str, Slice],
        placement: Placement,
        *,
        bias: bool = False,
        gated: bool = False,
        fp16: bool = False,
    ) -> None:
        super().__init__()
        self.inputs, self.parts, self.gated = inputs, dict(parts), gated
        self.backend = placement.backend
        self.method = placement.quantization.method_of([f"{placement.prefix}{name}" for name in parts])
        self._online = placement.quantization.online
        self.bias, self._has_bias, self._make = None, bias, placement.parameter
        self.recast(torch.float16 if fp16 and placement.dtype == torch.bfloat16 else placement.dtype)

    def recast(self, dtype: torch.dtype) -> None:
        """Create uninitialised parameters for activations of `dtype`, in place of any existing ones."""
        self.dtype = dtype
        self.method.create(self, self._make)
        if self._has_bias:
            self.bias = self._make(sum(part.count for part in self.parts.values()), dtype=dtype)

    def targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """Yield the names of the layer's tensors in a checkpoint, such as "q_proj.weight", and what each fills."""
        yield from self.method.dense_targets(self) if self._online else self.method.targets(self)
        yield from self._bias_targets()

    def fill_dense(self, fill: FillTarget) -> None:
        """Fill the parameters with dense tensors, which `fill` writes and the method quantises."""
        self.method.fill_dense(self, fill)
        for name, target in self._bias_targets():
            fill(name, target)

    def _bias_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        if self.bias is not None:
            views = torch.split(self.bias, [part.count for part in self.parts.values()])
            for (name, rows), view in zip(self.parts.items(), views, strict=True):
                yield f"{name}.bias", WeightTarget(view, (rows,))

    def forward(self, x_TN: Tensor, *, norm: RMSNorm | None = None, residual_TN: Tensor | None = None) -> Tensor:
        """Apply the layer to `x`, or to `norm(x)` with a `norm`; add the result to `residual_TN` in place, if given."""
        return self.method.apply(self, x_TN, _weight(norm), residual_TN)

    def finish(self, out_TF: Tensor) -> Tensor:
        """Apply bias and gate to `out_TF`, the result of a GEMM computed elsewhere; may change it in place."""
        if self.bias is not None:
            out_TF += self.bias
        return self.backend.silu_and_mul(out_TF) if self.gated else out_TF


def _weight(norm: RMSNorm | None) -> tuple[Tensor, float] | None:
    return None if norm is None else (norm.weight, norm.eps)


class TokenEmbedding(nn.Module):
    """Token embedding `[T] -> [T, N]`; with tied weights also the LM head."""

    def __init__(self, config: ModelConfig, placement: Placement, part: Slice | None = None) -> None:
        """`part`: the rank's entries of the vocabulary, if it is not that of the LM head."""
        super().__init__()
        self.backend = placement.backend
        self.part = part or placement.shard_plan.vocabulary
        self.weight = placement.parameter(self.part.count, config.hidden_size)

    def targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """Yield the name of the embedding in a checkpoint, and the rank's shard of it."""
        yield "embed_tokens.weight", WeightTarget(self.weight, (self.part, Slice.whole(self.weight.shape[1])))

    def forward(self, token_T: Tensor, layout: TPLayout | None = None) -> Tensor:
        """Return the residual stream; each rank looks up tokens of its vocabulary shard and takes zeros for others."""
        if layout is None:
            return functional.embedding(token_T, self.weight)
        local_T = layout.pad(token_T) - self.part.start
        other_T = (local_T < 0) | (local_T >= self.part.count)
        x_TN = functional.embedding(local_T.masked_fill_(other_T, 0), self.weight)
        return layout.begin(x_TN.masked_fill_(other_T.unsqueeze(1), 0))

    def logits(self, x_TN: Tensor, norm: RMSNorm) -> Tensor:
        """Return logits `[T, N] -> [T, V]`, with the embedding as LM head (Press & Wolf 2017)."""
        return self.backend.linear(x_TN, self.weight, norm=_weight(norm))


class KVScales(nn.Module):
    """Scales of a layer's cached keys and values that a checkpoint stores: float32 `[2, K]`, keys before values."""

    redundant = ("q_scale", "k_zero_point", "v_zero_point")  # queries are not rounded, and zero points are 0

    def __init__(self, placement: Placement) -> None:
        super().__init__()
        self.heads = placement.shard_plan.kv_heads
        self.per_head = placement.quantization.kv_scales == "head"
        self.scale = placement.parameter(2, self.heads.count, dtype=torch.float32)

    def targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """Yield "k_scale" and "v_scale", each one number, or `[K, 1, 1]` with a scale for each head."""
        parts = (self.heads, Slice.whole(1), Slice.whole(1)) if self.per_head else ()
        for name, scale_K in zip(("k_scale", "v_scale"), self.scale, strict=True):
            yield name, WeightTarget(scale_K, parts, convert=Tensor.flatten, allowed=KV_SCALES)


class Attention(nn.Module):
    """Causal grouped-query attention (Ainslie et al. 2023) with rotary positions, over a paged cache.

    `window` is the number of positions that a token attends to, itself included; None: all up to its own.
    """

    def __init__(
        self,
        config: ModelConfig,
        placement: Placement,
        *,
        qkv_bias: bool,
        o_bias: bool,
        qk_norm: bool,
        inputs: int | None = None,
    ) -> None:
        """`inputs`: columns of the QKV projection, if they are not the model's hidden size."""
        super().__init__()
        self.head_dim = config.head_dim
        self.window: int | None = None
        self.backend = placement.backend
        q, kv = (part.times(config.head_dim) for part in (placement.shard_plan.heads, placement.shard_plan.kv_heads))
        hidden = Slice.whole(config.hidden_size)
        parts = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        # Attention scores amplify the rounding errors of queries and keys.
        columns = hidden if inputs is None else Slice.whole(inputs)
        self.qkv_proj = Linear(columns, parts, placement, bias=qkv_bias, fp16=True)
        self.o_proj = Linear(q, {"o_proj": hidden}, placement, bias=o_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, placement) if qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, placement) if qk_norm else None
        self.kv_scales = KVScales(placement) if placement.quantization.kv_scales else None

    def forward(self, x_TN: Tensor, norm: RMSNorm, cache: LayerCache, step: ForwardContext) -> Tensor:
        """Return the residual stream `x` plus the attention of `norm(x)`; may change `x` in place."""
        write, qkv = self.kv_write(cache, step, x_TN.dtype), self.qkv_proj
        if step.layout is None or step.layout.replicated:
            q_THD = qkv.method.project_and_write_kv(qkv, x_TN, _weight(norm), write)
        else:
            q_THD = write_qkv(self.backend.rope_and_write_kv, self.project(x_TN, norm, step.layout), write)
        return self.add_output(self.attend(q_THD, cache, step), x_TN, step.layout)

    def kv_write(self, cache: LayerCache, step: ForwardContext, dtype: torch.dtype) -> KVWrite:
        """Return the positions and cache rows of the step's tokens; the rotated queries have `dtype`."""
        return KVWrite(step.rope_row_T, step.cos_sin_LD, cache, step.kv_index_T, self.qk_norm(), dtype)

    def attend(self, q_THD: Tensor, cache: LayerCache, step: ForwardContext) -> Tensor:
        """Return the attention of rotated queries, `[T, heads × D]`."""
        return self.backend.attention(q_THD, cache, step.batch, self.head_dim**-0.5, self.window).flatten(1)

    def project(self, x_TN: Tensor, norm: RMSNorm, layout: TPLayout | None) -> Tensor:
        """Return queries, keys and values of `norm(x)` side by side, `[T, heads × D]`."""
        if layout is None:
            qkv_TF: Tensor = self.qkv_proj(x_TN, norm=norm)
            return qkv_TF
        return layout.enter(x_TN, norm, self.qkv_proj)[: layout.tokens]

    def add_output(self, out_TF: Tensor, x_TN: Tensor, layout: TPLayout | None) -> Tensor:
        """Return the residual stream `x` plus the output projection of `out`; may change `x` in place."""
        if layout is not None:
            return layout.leave(out_TF, self.o_proj, x_TN)
        out_TN: Tensor = self.o_proj(out_TF, residual_TN=x_TN)
        return out_TN

    def qk_norm(self) -> QKNorm | None:
        """Return the norm of queries and keys that precedes their rotation; None if the model has none."""
        if self.q_norm is None or self.k_norm is None:
            return None
        return QKNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)


class FeedForward(nn.Module, ABC):
    """Second half of a decoder layer: an MLP, or a mixture of experts.

    Its tensors in a checkpoint are those of its `Linear` layers, those that a submodule's `targets` names, and all
    other parameters under their own names (`tok_core.models.weights.targets`).
    """

    @abstractmethod
    def forward(
        self, x_TN: Tensor, norm: RMSNorm, layout: TPLayout | None = None, batch: AttentionBatch | None = None
    ) -> Tensor:
        """Return the residual stream `x` plus the layer's result for `norm(x)`; may change `x` in place.

        layout  tensor-parallel layout of the step: its `enter` gathers rows, its `leave` sums over the ranks
        batch   attention inputs, which say which rows belong to no sequence; None: all rows belong to some
        """


class MLP(FeedForward):
    """SwiGLU MLP `down(silu(gate(x)) · up(x))` (Shazeer 2020, "GLU variants")."""

    def __init__(self, config: ModelConfig, placement: Placement, *, bias: bool, columns: Slice | None = None) -> None:
        """`columns`: the rank's columns between the two GEMMs, if their number is not the model's intermediate size."""
        super().__init__()
        hidden, own = Slice.whole(config.hidden_size), columns or placement.shard_plan.intermediate
        self.gate_up_proj = Linear(hidden, {"gate_proj": own, "up_proj": own}, placement, bias=bias, gated=True)
        self.down_proj = Linear(own, {"down_proj": hidden}, placement, bias=bias)

    def forward(
        self, x_TN: Tensor, norm: RMSNorm, layout: TPLayout | None = None, batch: AttentionBatch | None = None
    ) -> Tensor:
        if layout is not None:
            return layout.leave(layout.enter(x_TN, norm, self.gate_up_proj), self.down_proj, x_TN)
        gate_up = self.gate_up_proj
        return gate_up.method.mlp(gate_up, self.down_proj, x_TN, _weight(norm), x_TN)

    def result(self, x_TN: Tensor) -> Tensor:
        """Return the MLP of `x` without norm and residual: of an MLP without biases, this rank's part of the sum."""
        return self.gate_up_proj.method.mlp(self.gate_up_proj, self.down_proj, x_TN, None, None)
