"""Implement the reference backend in plain torch for any device: the CPU's backend, and the standard for the others."""

from __future__ import annotations

import torch
from torch import Tensor

from tok_kernels.attention.phases import Phase
from tok_kernels.attention.reference import attention, attention_with_lse
from tok_kernels.batch import AttentionBatch, LayerCache, QKNorm, Sampled, SamplingBatch
from tok_kernels.linear.reference import gated_linear, linear
from tok_kernels.norm_rope_kv.reference_activation import silu_and_mul
from tok_kernels.norm_rope_kv.reference_kv import write_kv
from tok_kernels.norm_rope_kv.reference_norm import rms_norm
from tok_kernels.norm_rope_kv.reference_rope import rope
from tok_kernels.sampling.reference.inversion import invert_cdf
from tok_kernels.sampling.reference.philox import philox4x32, uniform
from tok_kernels.sampling.reference.sampling import sample
from tok_kernels.slots.columns import DecodeRows, SlotColumns
from tok_kernels.slots.reference import decode_rows, record_sampled_tokens

__all__ = [
    "ReferenceBackend",
    "attention",
    "attention_with_lse",
    "gated_linear",
    "invert_cdf",
    "linear",
    "philox4x32",
    "rms_norm",
    "rope",
    "sample",
    "silu_and_mul",
    "uniform",
    "write_kv",
]


class ReferenceBackend:
    """A `tok_kernels.Backend` in plain torch; its methods call the functions of the same names in this package."""

    name = "reference"
    needs_host_lengths: frozenset[Phase] = frozenset()
    capturable = False

    def rms_norm(self, x_TN: Tensor, weight_N: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
        return rms_norm(x_TN, weight_N, eps, dtype)

    def linear(
        self,
        x_TK: Tensor,
        weight_NK: Tensor,
        bias_N: Tensor | None = None,
        *,
        norm: tuple[Tensor, float] | None = None,
        residual_TN: Tensor | None = None,
    ) -> Tensor:
        return linear(x_TK, weight_NK, bias_N, norm=norm, residual_TN=residual_TN)

    def gated_linear(
        self,
        x_TK: Tensor,
        gate_up_FK: Tensor,
        bias_F: Tensor | None = None,
        *,
        norm: tuple[Tensor, float] | None = None,
    ) -> Tensor:
        return gated_linear(x_TK, gate_up_FK, bias_F, norm=norm)

    def rope(self, q_THD: Tensor, k_TKD: Tensor, position_T: Tensor, cos_sin_LD: Tensor) -> tuple[Tensor, Tensor]:
        return rope(q_THD, k_TKD, position_T, cos_sin_LD)

    def rope_and_write_kv(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        position_T: Tensor,
        cos_sin_LD: Tensor,
        cache: LayerCache,
        index_T: Tensor,
        norm: QKNorm | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        dtype = dtype or q_THD.dtype
        q_THD, k_TKD = q_THD.float(), k_TKD.float()
        if norm is not None:
            q_THD, k_TKD = rms_norm(q_THD, norm.q_D, norm.eps), rms_norm(k_TKD, norm.k_D, norm.eps)
        q_THD, k_TKD = rope(q_THD, k_TKD, position_T, cos_sin_LD)
        write_kv(k_TKD, v_TKD, cache, index_T)
        return q_THD.to(dtype)

    def silu_and_mul(self, gate_up_TF: Tensor) -> Tensor:
        return silu_and_mul(gate_up_TF)

    def write_kv(self, k_TKD: Tensor, v_TKD: Tensor, cache: LayerCache, index_T: Tensor) -> None:
        write_kv(k_TKD, v_TKD, cache, index_T)

    def attention(
        self, q_THD: Tensor, cache: LayerCache, batch: AttentionBatch, scale: float, window: int | None = None
    ) -> Tensor:
        return attention(q_THD, cache, batch, scale, window)

    def sample(self, logits_RV: Tensor, batch: SamplingBatch) -> Sampled:
        return sample(logits_RV, batch)

    def decode_rows(self, slot_B: Tensor, slots: SlotColumns) -> DecodeRows:
        return decode_rows(slot_B, slots)

    def record_sampled_tokens(self, slot_R: Tensor, token_R: Tensor, logprob_R: Tensor, slots: SlotColumns) -> Tensor:
        return record_sampled_tokens(slot_R, token_R, logprob_R, slots)
