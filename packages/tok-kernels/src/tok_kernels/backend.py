"""The operations a model and a worker call, and the choice of who computes them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tok_kernels.batch import AttentionBatch, LayerCache, Sampled, SamplingBatch

BACKENDS = ("auto", "reference")


class Backend(Protocol):
    """Numerics of one device. Tensors live on that device; nothing here synchronises it or knows of requests.

    Legend of axes: see `tok_kernels.batch`.
    """

    @property
    def name(self) -> str: ...

    def rms_norm(self, x_TN: Tensor, weight_N: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm over the last axis (Zhang & Sennrich 2019), computed in float32; any leading
        axes."""
        ...

    def add_rms_norm(self, x_TN: Tensor, residual_TN: Tensor, weight_N: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """`residual' = residual + x`; returns `(rms_norm(residual'), residual')`, both of x's dtype."""
        ...

    def rope(self, q_THD: Tensor, k_TKD: Tensor, position_T: Tensor, cos_sin_LD: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary embedding (Su et al. 2021), halves rotated as in Llama; `cos_sin_LD` from `rope_table`,
        float32."""
        ...

    def silu_and_mul(self, gate_up_TF: Tensor) -> Tensor:
        """`silu(gate) * up` for `gate_up = [gate, up]` along the last axis: `[T, 2F] -> [T, F]`."""
        ...

    def write_kv(self, k_TKD: Tensor, v_TKD: Tensor, cache: LayerCache, index_T: Tensor) -> None:
        """Stores token `t`'s key and value at flat cache row `index_T[t]` (page × page_size + offset),
        int64."""
        ...

    def attention(self, q_THD: Tensor, cache: LayerCache, batch: AttentionBatch, scale: float) -> Tensor:
        """Paged, causal, grouped-query attention of one step with cascade levels: `[T, H, D]` of q's
        dtype."""
        ...

    def sample(self, logits_RV: Tensor, batch: SamplingBatch) -> Sampled:
        """Draws one token a row. Leaves `logits_RV` (float32 or bfloat16) unchanged."""
        ...


def choose(device: torch.device, requested: str = "auto") -> Backend:
    """The backend for `device`; `requested` is one of `BACKENDS`. Raises ValueError for any other name."""
    from tok_kernels.reference import ReferenceBackend

    if requested not in BACKENDS:
        raise ValueError(f"backend is {requested!r}; allowed: {', '.join(BACKENDS)}")
    return ReferenceBackend()
