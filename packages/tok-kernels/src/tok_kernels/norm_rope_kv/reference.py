"""Compute norm, rotary embedding, gated activation and cache writes in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tok_kernels.batch import LayerCache, QKNorm


def rms_norm(x_TN: Tensor, weight_N: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """Return `x / sqrt(mean(x²) + eps) * weight` over the last axis, of `dtype` or x's own (Zhang & Sennrich 2019)."""
    x = x_TN.float()
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x * scale * weight_N.float()).to(dtype or x_TN.dtype)


def rope(q_THD: Tensor, k_TKD: Tensor, position_T: Tensor, cos_sin_LD: Tensor) -> tuple[Tensor, Tensor]:
    """Return rotated copies of queries and keys, of their own dtypes; `position_T` int64 or int32 indexes `cos_sin_LD`.

    `cos_sin_LD` is float32 as made by `tok_kernels.norm_rope_kv.rope_table`. Entry `i` is paired with entry `i + D/2`
    (Su et al. 2021, in Llama's arrangement).
    """
    cos, sin = cos_sin_LD.index_select(0, position_T).unsqueeze(1).chunk(2, dim=-1)
    return _turn(q_THD, cos, sin), _turn(k_TKD, cos, sin)


def _turn(x_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x_THD.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_THD.dtype)


def rope_and_write_kv(
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
    """Rotate q and k, write the rotated k and v to the cache, and return the rotated q; see `Backend`."""
    dtype = dtype or q_THD.dtype
    q_THD, k_TKD = q_THD.float(), k_TKD.float()
    if norm is not None:
        q_THD, k_TKD = rms_norm(q_THD, norm.q_D, norm.eps), rms_norm(k_TKD, norm.k_D, norm.eps)
    q_THD, k_TKD = rope(q_THD, k_TKD, position_T, cos_sin_LD)
    write_kv(k_TKD, v_TKD, cache, index_T)
    return q_THD.to(dtype)


def silu_and_mul(gate_up_TF: Tensor) -> Tensor:
    """Return `silu(gate) * up` in float32, `gate` the first and `up` the second half of the last axis (Shazeer 2020).

    `[..., 2F] -> [..., F]`, of the input's dtype.
    """
    gate, up = gate_up_TF.chunk(2, dim=-1)
    return (F.silu(gate.float()) * up.float()).to(gate_up_TF.dtype)


def write_kv(k_TKD: Tensor, v_TKD: Tensor, cache: LayerCache, index_T: Tensor) -> None:
    """Store token `t`'s key and value at flat row `index_T[t]` (int64), converted to the cache's dtype.

    For float8_e4m3fn, values are clamped to ±448, then rounded to nearest, ties to even; NaN stays NaN. Of tokens with
    the same index, any may remain. The cache's pages must be evenly spaced in memory (RuntimeError otherwise).
    """
    _store(cache.k, index_T, k_TKD)
    _store(cache.v, index_T, v_TKD)


def _store(pages: Tensor, index_T: Tensor, x_TKD: Tensor) -> None:
    # view, not reshape: reshape may copy silently, and the write would be lost.
    rows = pages.view(-1, *pages.shape[2:])
    if pages.dtype != torch.float8_e4m3fn:
        rows.index_copy_(0, index_T, x_TKD.to(pages.dtype))
        return
    largest = torch.finfo(pages.dtype).max
    narrow = x_TKD.float().clamp(-largest, largest).to(pages.dtype)
    rows.view(torch.uint8).index_copy_(0, index_T, narrow.view(torch.uint8))
