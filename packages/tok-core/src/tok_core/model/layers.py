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
from tok_kernels import AttentionBatch, Backend, LayerCache


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


class Linear(nn.Module):
    """`x Wᵀ + b`; where `parts` names several matrices they are stacked by rows: one multiplication for all.

    `parts` maps the name of each matrix in a checkpoint to its number of rows.
    """

    def __init__(self, inputs: int, parts: Mapping[str, int], place: Placement, bias: bool = False) -> None:
        super().__init__()
        self.parts = dict(parts)
        self.weight = place.parameter(sum(parts.values()), inputs)
        self.bias = place.parameter(sum(parts.values())) if bias else None

    def forward(self, x_TN: Tensor) -> Tensor:
        return functional.linear(x_TN, self.weight, self.bias)


class Embedding(nn.Module):
    """One row of `weight` a token: `[T] -> [T, N]`; `logits` compares hidden states with every row."""

    def __init__(self, vocab_size: int, hidden_size: int, place: Placement) -> None:
        super().__init__()
        self.weight = place.parameter(vocab_size, hidden_size)

    def forward(self, token_T: Tensor) -> Tensor:
        return functional.embedding(token_T, self.weight)

    def logits(self, x_TN: Tensor) -> Tensor:
        """`[T, N] -> [T, V]`: the embedding as LM head (Press & Wolf 2017)."""
        return functional.linear(x_TN, self.weight)


class RMSNorm(nn.Module):
    """`x / rms(x) · weight` over the last axis; `after_add` first adds `x` to the residual stream."""

    def __init__(self, size: int, eps: float, place: Placement) -> None:
        super().__init__()
        self.weight = place.parameter(size)
        self.eps = eps
        self.backend = place.backend

    def forward(self, x_TN: Tensor) -> Tensor:
        return self.backend.rms_norm(x_TN, self.weight, self.eps)

    def after_add(self, x_TN: Tensor, residual_TN: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of `residual + x`, and `residual + x` itself."""
        return self.backend.add_rms_norm(x_TN, residual_TN, self.weight, self.eps)


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

    def forward(self, x_TN: Tensor, cache: LayerCache, step: Step) -> Tensor:
        q_THD, k_TKD, v_TKD = self.heads(x_TN)
        q_THD = self.backend.rope_and_write_kv(
            q_THD, k_TKD, v_TKD, step.position_T, step.cos_sin_LD, cache, step.kv_index_T
        )
        out_THD = self.backend.attention(q_THD, cache, step.batch, self.head_dim**-0.5)
        out_TN: Tensor = self.o_proj(out_THD.flatten(1))
        return out_TN

    def heads(self, x_TN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `[T, H, D]`, keys and values `[T, K, D]`: of one product, normed if the model does so."""
        parts = self.qkv_proj(x_TN).split(list(self.qkv_proj.parts.values()), dim=-1)
        q_THD, k_TKD, v_TKD = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        if self.q_norm is not None and self.k_norm is not None:
            q_THD, k_TKD = self.q_norm(q_THD), self.k_norm(k_TKD)
        return q_THD, k_TKD, v_TKD


class MLP(nn.Module):
    """`down(silu(gate(x)) · up(x))` (Shazeer 2020, "GLU variants")."""

    def __init__(self, config: ModelConfig, place: Placement, *, bias: bool) -> None:
        super().__init__()
        size = config.intermediate_size
        self.backend = place.backend
        parts = {"gate_proj": size, "up_proj": size}
        self.gate_up_proj = Linear(config.hidden_size, parts, place, bias=bias)
        self.down_proj = Linear(size, {"down_proj": config.hidden_size}, place, bias=bias)

    def forward(self, x_TN: Tensor) -> Tensor:
        out_TN: Tensor = self.down_proj(self.backend.silu_and_mul(self.gate_up_proj(x_TN)))
        return out_TN
