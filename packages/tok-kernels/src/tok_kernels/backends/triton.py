"""Implement the Triton backend for CUDA devices, which needs no planning on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from tok_kernels.attention.phases import Phase
from tok_kernels.attention.triton.attention import attention
from tok_kernels.batch import AttentionBatch, LayerCache, QKNorm, Sampled, SamplingBatch
from tok_kernels.linear.triton import gated_linear, linear
from tok_kernels.norm_rope_kv.triton_activation import silu_and_mul
from tok_kernels.norm_rope_kv.triton_kv import write_kv
from tok_kernels.norm_rope_kv.triton_norm import rms_norm
from tok_kernels.norm_rope_kv.triton_rope import rope, rope_and_write_kv
from tok_kernels.sampling.triton.sampling import sample
from tok_kernels.slots.columns import DecodeRows, SlotColumns
from tok_kernels.slots.triton import decode_rows, record_sampled_tokens


class TritonBackend:
    """A `tok_kernels.Backend` in Triton; its methods call the functions of the same names in this package."""

    name: str = "triton"
    needs_host_lengths: frozenset[Phase] = frozenset()
    capturable: bool = True

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
        return rope_and_write_kv(q_THD, k_TKD, v_TKD, position_T, cos_sin_LD, cache, index_T, norm, dtype)

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
