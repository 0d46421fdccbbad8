"""The Triton backend: every operation as kernels of our own, for CUDA devices without a CPU plan."""

from __future__ import annotations

from torch import Tensor

from tok_kernels.batch import AttentionBatch, LayerCache, Sampled, SamplingBatch
from tok_kernels.triton.activation import silu_and_mul
from tok_kernels.triton.attention import attention
from tok_kernels.triton.kv import write_kv
from tok_kernels.triton.norm import add_rms_norm, rms_norm
from tok_kernels.triton.rope import rope, rope_and_write_kv
from tok_kernels.triton.sampling import sample


class TritonBackend:
    """`tok_kernels.Backend` in Triton; each method is the function of the same name in this package."""

    name = "triton"

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
        rope_and_write_kv(q_THD, k_TKD, v_TKD, position_T, cos_sin_LD, cache, index_T)
        return q_THD

    def silu_and_mul(self, gate_up_TF: Tensor) -> Tensor:
        return silu_and_mul(gate_up_TF)

    def write_kv(self, k_TKD: Tensor, v_TKD: Tensor, cache: LayerCache, index_T: Tensor) -> None:
        write_kv(k_TKD, v_TKD, cache, index_T)

    def attention(self, q_THD: Tensor, cache: LayerCache, batch: AttentionBatch, scale: float) -> Tensor:
        return attention(q_THD, cache, batch, scale)

    def sample(self, logits_RV: Tensor, batch: SamplingBatch) -> Sampled:
        return sample(logits_RV, batch)
