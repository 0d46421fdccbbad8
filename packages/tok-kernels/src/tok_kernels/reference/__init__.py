"""The reference backend: plain torch on any device; the oracle of the others, and the CPU's own."""

from __future__ import annotations

from torch import Tensor

from tok_kernels.batch import AttentionBatch, LayerCache, Sampled, SamplingBatch
from tok_kernels.reference.activation import silu_and_mul
from tok_kernels.reference.attention import attention, attention_with_lse
from tok_kernels.reference.kv import write_kv
from tok_kernels.reference.norm import add_rms_norm, rms_norm
from tok_kernels.reference.philox import philox4x32, uniform
from tok_kernels.reference.rope import rope
from tok_kernels.reference.sampling import invert_cdf, sample

__all__ = [
    "ReferenceBackend",
    "add_rms_norm",
    "attention",
    "attention_with_lse",
    "invert_cdf",
    "philox4x32",
    "rms_norm",
    "rope",
    "sample",
    "silu_and_mul",
    "uniform",
    "write_kv",
]


class ReferenceBackend:
    """`tok_kernels.Backend` in plain torch; each method is the function of the same name in this package."""

    name = "reference"

    def rms_norm(self, x_TN: Tensor, weight_N: Tensor, eps: float) -> Tensor:
        return rms_norm(x_TN, weight_N, eps)

    def add_rms_norm(self, x_TN: Tensor, residual_TN: Tensor, weight_N: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x_TN, residual_TN, weight_N, eps)

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
    ) -> Tensor:
        q_THD, k_TKD = rope(q_THD, k_TKD, position_T, cos_sin_LD)
        write_kv(k_TKD, v_TKD, cache, index_T)
        return q_THD

    def silu_and_mul(self, gate_up_TF: Tensor) -> Tensor:
        return silu_and_mul(gate_up_TF)

    def write_kv(self, k_TKD: Tensor, v_TKD: Tensor, cache: LayerCache, index_T: Tensor) -> None:
        write_kv(k_TKD, v_TKD, cache, index_T)

    def attention(self, q_THD: Tensor, cache: LayerCache, batch: AttentionBatch, scale: float) -> Tensor:
        return attention(q_THD, cache, batch, scale)

    def sample(self, logits_RV: Tensor, batch: SamplingBatch) -> Sampled:
        return sample(logits_RV, batch)
