"""Project queries, keys and values, and rotate and store them, in two operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tok_kernels.batch import KVWrite

if TYPE_CHECKING:
    from tok_kernels.backend import Backend
    from tok_kernels.linear.quantized_weights import ScaledWeight


def write_qkv(rope_and_write_kv: Callable[..., Tensor], qkv_TF: Tensor, write: KVWrite) -> Tensor:
    """Apply `Backend.rope_and_write_kv` to the result of a QKV projection, and return the rotated q."""
    kv_heads, head_dim = write.cache.k.shape[2:]
    qkv_THD = torch.unflatten(qkv_TF, -1, (-1, head_dim))
    parts = torch.split(qkv_THD, [qkv_THD.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    return rope_and_write_kv(
        *parts, write.position_T, write.cos_sin_LD, write.cache, write.index_T, norm=write.norm, dtype=write.dtype
    )


class SeparateProjection:
    """Backend whose QKV projections call its linear layers, and then its `rope_and_write_kv`."""

    def project_and_write_kv(
        self: Backend,
        x_TK: Tensor,
        weight_NK: Tensor,
        bias_N: Tensor | None,
        write: KVWrite,
        *,
        norm: tuple[Tensor, float] | None = None,
    ) -> Tensor:
        """Compute `Backend.project_and_write_kv`."""
        return write_qkv(self.rope_and_write_kv, self.linear(x_TK, weight_NK, bias_N, norm=norm), write)

    def scaled_project_and_write_kv(
        self: Backend,
        x_TK: Tensor,
        weight: ScaledWeight,
        bias_N: Tensor | None,
        write: KVWrite,
        *,
        norm: tuple[Tensor, float] | None = None,
    ) -> Tensor:
        """Compute `Backend.scaled_project_and_write_kv`."""
        return write_qkv(self.rope_and_write_kv, self.scaled_linear(x_TK, weight, bias_N, norm=norm), write)
