"""Compute RMS norm, rotary embedding, gated activation and KV cache writes in plain torch.

Axes beyond those of `tok_kernels.batch`: F gate and up columns together, L positions of the RoPE table.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tok_kernels.batch import LayerCache, QKNorm

INT8_MAX = 127.0
# A head whose absolute maximum is not above this is stored as zeros, since 127 / absmax may overflow float32.
MIN_SCALED_ABSMAX = 1e-30


def rms_norm(x_TN: Tensor, weight_N: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """Compute `Backend.rms_norm`."""
    x = x_TN.float()
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x * scale * weight_N.float()).to(dtype or x_TN.dtype)


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
    """Compute `Backend.rope_and_write_kv`."""
    dtype = dtype or q_THD.dtype
    q_THD, k_TKD = q_THD.float(), k_TKD.float()
    if norm is not None:
        q_THD, k_TKD = rms_norm(q_THD, norm.q_D, norm.eps), rms_norm(k_TKD, norm.k_D, norm.eps)
    cos, sin = cos_sin_LD.index_select(0, position_T).unsqueeze(1).chunk(2, dim=-1)
    q_THD, k_TKD = _rotate(q_THD, cos, sin), _rotate(k_TKD, cos, sin)
    _write_cache(cache.k, index_T, k_TKD, cache.k_scale, cache.k_token_scale)
    _write_cache(cache.v, index_T, v_TKD, cache.v_scale, cache.v_token_scale)
    if cache.k_scale is not None:
        q_THD = q_THD * cache.k_scale.repeat_interleave(q_THD.shape[1] // k_TKD.shape[1]).unsqueeze(-1)
    return q_THD.to(dtype)


def _rotate(x_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + D / 2) of the float32 heads; `cos` and `sin` are float32 `[T, 1, D / 2]`."""
    first, second = x_THD.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def silu_and_mul(gate_up_TF: Tensor) -> Tensor:
    """Compute `Backend.silu_and_mul`."""
    gate, up = gate_up_TF.chunk(2, dim=-1)
    return (F.silu(gate.float()) * up.float()).to(gate_up_TF.dtype)


def _write_cache(
    pages: Tensor, index_T: Tensor, x_TKD: Tensor, scale_K: Tensor | None, token_scale_PKS: Tensor | None
) -> None:
    """Write keys or values to the flat rows `index_T` of pages `[P, S, K, D]`, quantised as `LayerCache` describes."""
    # `reshape` may copy, and a write to the copy would be lost.
    rows = pages.view(-1, *pages.shape[2:])
    if token_scale_PKS is not None:
        x_TKD, scale_TK = _quantize_tokens(x_TKD.float())
        page_size = pages.shape[1]
        token_scale_PKS[index_T // page_size, :, index_T % page_size] = scale_TK
    if scale_K is not None:
        x_TKD = x_TKD.float() / scale_K.unsqueeze(-1)
    if pages.dtype != torch.float8_e4m3fn:
        rows.index_copy_(0, index_T, x_TKD.to(pages.dtype))
        return
    fp8_max = torch.finfo(pages.dtype).max
    quantized = x_TKD.float().clamp(-fp8_max, fp8_max).to(pages.dtype)
    # torch's `index_copy_` does not support float8, so rows are copied as bytes.
    rows.view(torch.uint8).index_copy_(0, index_T, quantized.view(torch.uint8))


def _quantize_tokens(x_TKD: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise float32 heads to integers in ±127, one scale per head: x ≈ integer · scale.

    Return the integers as float32 `[T, K, D]`, and the scales, float32 `[T, K]`.
    """
    absmax_TK = x_TKD.abs().amax(-1) + (x_TKD * 0.0).sum(-1)  # NaN if an entry is not finite
    # A tensor, because torch divides by a Python number through its reciprocal, which rounds differently.
    int8_max_TK = torch.full_like(absmax_TK, INT8_MAX)
    inv_scale_TK = torch.where(absmax_TK > MIN_SCALED_ABSMAX, int8_max_TK / absmax_TK, 0.0)
    return (x_TKD * inv_scale_TK.unsqueeze(-1)).nan_to_num(0.0).round(), absmax_TK / int8_max_TK
