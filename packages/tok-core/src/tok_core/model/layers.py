"""The building blocks of a decoder, each a few tensors and one formula.

Axes: T tokens of the step, N hidden size, F intermediate size, H query heads, K key/value heads, D head size,
V vocabulary, L positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from tok_core.model.config import ModelConfig
from tok_kernels import AttentionBatch, Backend, LayerCache, QKNorm


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a model lives and who computes it."""

    backend: Backend
    device: torch.device
    dtype: torch.dtype

    def parameter(self, *shape: int) -> nn.Parameter:
        """An uninitialised parameter; no gradient is ever taken."""
        return nn.Parameter(torch.empty(shape, device=self.device, dtype=self.dtype), requires_grad=False)


@dataclass(frozen=True, slots=True)
class Step:
    """What the layers of one forward pass share: positions and cache rows, int64 `[T]`; what to attend to."""

    position_T: Tensor
    kv_index_T: Tensor
    batch: AttentionBatch
    cos_sin_LD: Tensor


class RMSNorm(nn.Module):
    """`x / rms(x) · weight` over the last axis; computed by what reads the result."""

    def __init__(self, size: int, eps: float, place: Placement) -> None:
        super().__init__()
        self.weight = place.parameter(size)
        self.eps = eps


class Linear(nn.Module):
    """`x Wᵀ + b`; where `parts` names several matrices they are stacked by rows: one multiplication for all.

    `parts` maps the name of each matrix in a checkpoint to its number of rows.
    """

    def __init__(self, inputs: int, parts: Mapping[str, int], place: Placement, bias: bool = False) -> None:
        super().__init__()
        self.parts = dict(parts)
        self.backend = place.backend
        self.weight = place.parameter(sum(parts.values()), inputs)
        self.bias = place.parameter(sum(parts.values())) if bias else None

    def forward(self, x_TN: Tensor, *, norm: RMSNorm | None = None, residual_TN: Tensor | None = None) -> Tensor:
        """Of `norm(x)` where one is given; added, in place, to the residual stream where that is given."""
        return self.backend.linear(x_TN, self.weight, self.bias, norm=_weight(norm), residual_TN=residual_TN)


def _weight(norm: RMSNorm | None) -> tuple[Tensor, float] | None:
    return None if norm is None else (norm.weight, norm.eps)


class Embedding(nn.Module):
    """One row of `weight` a token: `[T] -> [T, N]`; `logits` compares normed hidden states with every row."""

    def __init__(self, vocab_size: int, hidden_size: int, place: Placement) -> None:
        super().__init__()
        self.backend = place.backend
        self.weight = place.parameter(vocab_size, hidden_size)

    def forward(self, token_T: Tensor) -> Tensor:
        return functional.embedding(token_T, self.weight)

    def logits(self, x_TN: Tensor, norm: RMSNorm) -> Tensor:
        """`[T, N] -> [T, V]`: the embedding as LM head (Press & Wolf 2017)."""
        return self.backend.linear(x_TN, self.weight, norm=_weight(norm))


class Attention(nn.Module):
    """Causal grouped-query attention (Ainslie et al. 2023) with rotary positions, over a paged cache."""

    def __init__(self, config: ModelConfig, place: Placement, *, qkv_bias: bool, o_bias: bool, qk_norm: bool) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.backend = place.backend
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = Linear(config.hidden_size, parts, place, bias=qkv_bias)
        self.o_proj = Linear(q_size, {"o_proj": config.hidden_size}, place, bias=o_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, place) if qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, place) if qk_norm else None

    def forward(self, x_TN: Tensor, norm: RMSNorm, cache: LayerCache, step: Step) -> Tensor:
        """Adds the attention of `norm(x)` to the residual stream `x`, in place."""
        q_THD, k_TKD, v_TKD = self.heads(x_TN, norm)
        q_THD = self.backend.rope_and_write_kv(
            q_THD, k_TKD, v_TKD, step.position_T, step.cos_sin_LD, cache, step.kv_index_T, self.qk_norm()
        )
        out_THD = self.backend.attention(q_THD, cache, step.batch, self.head_dim**-0.5)
        out_TN: Tensor = self.o_proj(out_THD.flatten(1), residual_TN=x_TN)
        return out_TN

    def heads(self, x_TN: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `[T, H, D]`, keys and values `[T, K, D]`: views of one product."""
        parts = self.qkv_proj(x_TN, norm=norm).split(list(self.qkv_proj.parts.values()), dim=-1)
        q_THD, k_TKD, v_TKD = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        return q_THD, k_TKD, v_TKD

    def qk_norm(self) -> QKNorm | None:
        """How queries and keys are normed ahead of their rotation, if the model does so."""
        if self.q_norm is None or self.k_norm is None:
            return None
        return QKNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)


class MLP(nn.Module):
    """`down(silu(gate(x)) · up(x))` (Shazeer 2020, "GLU variants")."""

    def __init__(self, config: ModelConfig, place: Placement, *, bias: bool) -> None:
        super().__init__()
        size = config.intermediate_size
        self.backend = place.backend
        parts = {"gate_proj": size, "up_proj": size}
        self.gate_up_proj = Linear(config.hidden_size, parts, place, bias=bias)
        self.down_proj = Linear(size, {"down_proj": config.hidden_size}, place, bias=bias)

    def forward(self, x_TN: Tensor, norm: RMSNorm) -> Tensor:
        """Adds the MLP of `norm(x)` to the residual stream `x`, in place."""
        gate_up = self.gate_up_proj
        gated_TF = self.backend.gated_linear(x_TN, gate_up.weight, gate_up.bias, norm=_weight(norm))
        out_TN: Tensor = self.down_proj(gated_TF, residual_TN=x_TN)
        return out_TN
