"""The building blocks of a decoder, each a few tensors and one formula, or one rank's part of it.

Axes: T tokens of the step, N hidden size, F intermediate size, H query heads, K key/value heads, D head size,
V vocabulary, L positions. F, H, K and V are a rank's own part of the model's where several share it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from tok_core.model_config import ModelConfig
from tok_core.parallel import ShardPlan, Slice
from tok_kernels import AttentionBatch, Backend, LayerCache, QKNorm

if TYPE_CHECKING:
    from tok_core.parallel import TensorParallel, TPLayout


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a model lives, who computes it, and which share of it; `tensor` joins the ranks of a stage, if several."""

    backend: Backend
    device: torch.device
    dtype: torch.dtype
    share: ShardPlan
    tensor: TensorParallel | None = None

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """An uninitialised parameter, of the model's dtype unless told; no gradient is ever taken."""
        empty = torch.empty(shape, device=self.device, dtype=dtype or self.dtype)
        return nn.Parameter(empty, requires_grad=False)


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Inputs that layers of one pass share: rows of `cos_sin_LD` and of the cache, int64 `[T]`; what to attend to;
    how the ranks compute it together, None for one that is alone."""

    rope_row_T: Tensor
    kv_index_T: Tensor
    batch: AttentionBatch
    cos_sin_LD: Tensor
    form: TPLayout | None = None


class RMSNorm(nn.Module):
    """`x / rms(x) · weight` over the last axis; computed by what reads the result, where that can."""

    def __init__(self, size: int, eps: float, place: Placement) -> None:
        super().__init__()
        self.backend = place.backend
        self.weight = place.parameter(size)
        self.eps = eps

    def forward(self, x_TN: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return self.backend.rms_norm(x_TN, self.weight, self.eps, dtype)


class Linear(nn.Module):
    """`x Wᵀ + b`; where `parts` names several matrices they are stacked by rows: one multiplication for all.

    `parts` maps the name of each matrix in a checkpoint to the rows of it that are here; `inputs` says which of its
    columns are. A `gated` one makes `silu(gate) · up` of its two matrices' results. A `finer` one is float16 in place
    of bfloat16, and so is what it multiplies and makes: eight times as fine, for what is rounded to bfloat16 later on.
    Whether float16 has the range is seen when weights are loaded: `tok_core.models.weights.float16`.
    """

    def __init__(
        self,
        inputs: Slice,
        parts: Mapping[str, Slice],
        place: Placement,
        *,
        bias: bool = False,
        gated: bool = False,
        finer: bool = False,
    ) -> None:
        super().__init__()
        self.inputs, self.parts, self.gated = inputs, dict(parts), gated
        self.backend = place.backend
        rows = sum(part.count for part in parts.values())
        dtype = torch.float16 if finer and place.dtype == torch.bfloat16 else place.dtype
        self.weight = place.parameter(rows, inputs.count, dtype=dtype)
        self.bias = place.parameter(rows, dtype=dtype) if bias else None

    def forward(self, x_TN: Tensor, *, norm: RMSNorm | None = None, residual_TN: Tensor | None = None) -> Tensor:
        """Of `norm(x)` where one is given; added, in place, to the residual stream where that is given."""
        if self.gated:
            return self.backend.gated_linear(x_TN, self.weight, self.bias, norm=_weight(norm))
        return self.backend.linear(x_TN, self.weight, self.bias, norm=_weight(norm), residual_TN=residual_TN)

    def finish(self, out_TF: Tensor) -> Tensor:
        """What `forward` makes of its product, which is changed in place, once that was computed elsewhere."""
        if self.bias is not None:
            out_TF += self.bias
        return self.backend.silu_and_mul(out_TF) if self.gated else out_TF

    def recast(self, dtype: torch.dtype) -> None:
        """Gives it parameters of `dtype`, yet to be filled."""
        for name, parameter in list(self.named_parameters()):
            setattr(self, name, nn.Parameter(torch.empty_like(parameter, dtype=dtype), requires_grad=False))


def _weight(norm: RMSNorm | None) -> tuple[Tensor, float] | None:
    return None if norm is None else (norm.weight, norm.eps)


class TokenEmbedding(nn.Module):
    """One row of `weight` a token: `[T] -> [T, N]`; `logits` compares normed hidden states with every row."""

    def __init__(self, config: ModelConfig, place: Placement) -> None:
        super().__init__()
        self.backend = place.backend
        self.part = place.share.vocabulary
        self.weight = place.parameter(self.part.count, config.hidden_size)

    def forward(self, token_T: Tensor, form: TPLayout | None = None) -> Tensor:
        """The residual stream; each rank looks up the tokens it has, for zeros else."""
        if form is None:
            return functional.embedding(token_T, self.weight)
        local_T = form.pad(token_T) - self.part.start
        other_T = (local_T < 0) | (local_T >= self.part.count)
        x_TN = functional.embedding(local_T.masked_fill_(other_T, 0), self.weight)
        return form.begin(x_TN.masked_fill_(other_T.unsqueeze(1), 0))

    def logits(self, x_TN: Tensor, norm: RMSNorm) -> Tensor:
        """`[T, N] -> [T, V]`: the embedding as LM head (Press & Wolf 2017)."""
        return self.backend.linear(x_TN, self.weight, norm=_weight(norm))


class Attention(nn.Module):
    """Causal grouped-query attention (Ainslie et al. 2023) with rotary positions, over a paged cache.

    `window` is the number of positions that a token sees, itself included; None: all up to its own.
    """

    def __init__(self, config: ModelConfig, place: Placement, *, qkv_bias: bool, o_bias: bool, qk_norm: bool) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.window: int | None = None
        self.backend = place.backend
        q, kv = (part.times(config.head_dim) for part in (place.share.heads, place.share.kv_heads))
        hidden = Slice.whole(config.hidden_size)
        parts = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        # Scores magnify what queries and keys are rounded by.
        self.qkv_proj = Linear(hidden, parts, place, bias=qkv_bias, finer=True)
        self.o_proj = Linear(q, {"o_proj": hidden}, place, bias=o_bias)
        self.sizes = [q.count, kv.count, kv.count]
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, place) if qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, place) if qk_norm else None

    def forward(self, x_TN: Tensor, norm: RMSNorm, cache: LayerCache, step: ForwardContext) -> Tensor:
        """The residual stream `x`, which may change in place, with the attention of `norm(x)` added."""
        form = step.form
        if form is None:
            qkv_TF = self.qkv_proj(x_TN, norm=norm)
        else:
            qkv_TF = form.enter(x_TN, norm, self.qkv_proj)[: form.tokens]
        q_THD, k_TKD, v_TKD = (part.unflatten(-1, (-1, self.head_dim)) for part in qkv_TF.split(self.sizes, dim=-1))
        q_THD = self.backend.rope_and_write_kv(
            *(q_THD, k_TKD, v_TKD, step.rope_row_T, step.cos_sin_LD, cache, step.kv_index_T, self.qk_norm()),
            dtype=x_TN.dtype,
        )
        out_TF = self.backend.attention(q_THD, cache, step.batch, self.head_dim**-0.5, self.window).flatten(1)
        if form is not None:
            return form.leave(out_TF, self.o_proj, x_TN)
        out_TN: Tensor = self.o_proj(out_TF, residual_TN=x_TN)
        return out_TN

    def qk_norm(self) -> QKNorm | None:
        """How queries and keys are normed ahead of their rotation, if the model does so."""
        if self.q_norm is None or self.k_norm is None:
            return None
        return QKNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)


class MLP(nn.Module):
    """`down(silu(gate(x)) · up(x))` (Shazeer 2020, "GLU variants")."""

    def __init__(self, config: ModelConfig, place: Placement, *, bias: bool) -> None:
        super().__init__()
        hidden, own = Slice.whole(config.hidden_size), place.share.intermediate
        self.gate_up_proj = Linear(hidden, {"gate_proj": own, "up_proj": own}, place, bias=bias, gated=True)
        self.down_proj = Linear(own, {"down_proj": hidden}, place, bias=bias)

    def forward(self, x_TN: Tensor, norm: RMSNorm, form: TPLayout | None = None) -> Tensor:
        """The residual stream `x`, which may change in place, with the MLP of `norm(x)` added."""
        if form is not None:
            return form.leave(form.enter(x_TN, norm, self.gate_up_proj), self.down_proj, x_TN)
        out_TN: Tensor = self.down_proj(self.gate_up_proj(x_TN, norm=norm), residual_TN=x_TN)
        return out_TN
