"""The operations a model and a worker call, and the choice of who computes them."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from tok_kernels.batch import AttentionBatch, LayerCache, Sampled, SamplingBatch

BACKENDS = ("auto", "reference", "triton")


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
        """`rope`, then `write_kv` of the turned keys and of the values; returns the turned queries, which may
        be `q_THD` itself, turned in place."""
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
    """The backend for `device`; `requested` is one of `BACKENDS`, "auto" being Triton on a CUDA device.

    Raises ValueError for any other name, and for Triton where there is none or on another device.
    """
    if requested not in BACKENDS:
        raise ValueError(f"backend is {requested!r}; allowed: {', '.join(BACKENDS)}")
    usable = device.type == "cuda" and find_spec("triton") is not None
    if requested == "triton" and not usable:
        raise ValueError(f"backend is {requested!r}; allowed on {device.type} here: reference")
    if requested == "triton" or (requested == "auto" and usable):
        from tok_kernels.triton.backend import TritonBackend

        return TritonBackend()
    from tok_kernels.reference import ReferenceBackend

    return ReferenceBackend()
