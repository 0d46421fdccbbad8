"""Fuse QK norm, rotary embedding and the KV cache write into one kernel, with one program per token."""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tok_kernels.batch import LayerCache, QKNorm
from tok_kernels.launch_config import pdl_options
from tok_kernels.norm_rope_kv.triton_kv import (
    cache_rows,
    cast_to_target,
    contiguous_heads,
    copy_heads,
    row_absmax,
    store_token_scales,
    token_scales,
)


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
    """Compute `Backend.rope_and_write_kv` in one launch.

    The rotated queries overwrite `q_THD`, unless elements of `dtype` have another size than q's. `q_THD`, `k_TKD` and
    `v_TKD` may be views of one GEMM output; its keys and values stay unchanged. Rotated queries are rounded only once,
    to `dtype`: with bfloat16 they may exceed the range of a float16 q.

    Raises ValueError if the last axis of q is not contiguous, or if a norm weight has another length than that axis.
    """
    if q_THD.stride(-1) != 1:
        raise ValueError(f"q has a stride of {q_THD.stride(-1)} along its last axis; allowed: 1")
    q_weight, k_weight = _norm_weights(q_THD, norm)
    dtype = dtype or q_THD.dtype
    if dtype.itemsize == q_THD.dtype.itemsize:
        rotated = q_THD.view(dtype)
    else:
        rotated = torch.empty(q_THD.shape, dtype=dtype, device=q_THD.device)
    if not q_THD.shape[0]:
        return rotated
    k, v, cos_sin_table = contiguous_heads(k_TKD), contiguous_heads(v_TKD), cos_sin_LD.contiguous()
    k_rows, v_rows = cache_rows(cache)
    _rope_and_write_kv_kernel[(q_THD.shape[0],)](
        *(q_THD, q_THD.stride(0), q_THD.stride(1), rotated, rotated.stride(0), rotated.stride(1), q_THD.shape[1]),
        *(k, k.stride(0), k.stride(1), v, v.stride(0), v.stride(1), k.shape[1]),
        *(k_rows, k_rows.stride(0), k_rows.stride(1), v_rows, v_rows.stride(0), v_rows.stride(1)),
        *(position_T.contiguous(), cos_sin_table, index_T.contiguous(), q_THD.shape[2] // 2),
        *(q_weight, k_weight, norm.eps if norm else 0.0, cache.k_scale, cache.v_scale, *token_scales(cache)),
        **_launch_options(q_THD, k),
        PAGE=cache.page_size,
        NORM=norm is not None,
        **pdl_options(q_THD.device),
    )
    return rotated


def _norm_weights(q_THD: Tensor, norm: QKNorm | None) -> tuple[Tensor, Tensor]:
    """Return the norm's weights `[D]`, or placeholders that the kernel does not read if there is no norm."""
    if norm is None:
        return q_THD, q_THD
    for name, weight in (("q", norm.q_D), ("k", norm.k_D)):
        if weight.shape != q_THD.shape[-1:]:
            raise ValueError(
                f"the norm weight of {name} has shape {tuple(weight.shape)}; allowed: {(q_THD.shape[-1],)}"
            )
    return norm.q_D.contiguous(), norm.k_D.contiguous()


def _launch_options(q: Tensor, k: Tensor) -> dict[str, int]:
    heads, half = triton.next_power_of_2(q.shape[1]), triton.next_power_of_2(q.shape[2] // 2)
    return {
        "Q_HEADS": heads,
        "K_HEADS": triton.next_power_of_2(k.shape[1]),
        "HALF": half,
        "num_warps": min(max(heads * half // 512, 1), 8),
    }


@triton.jit(do_not_specialize_on_alignment=["position", "index"])
def _rope_and_write_kv_kernel(
    q: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    rotated_q: tl.tensor,
    rotated_q_token_stride: tl.tensor,
    rotated_q_head_stride: tl.tensor,
    q_heads: tl.tensor,
    k: tl.tensor,
    k_token_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v: tl.tensor,
    v_token_stride: tl.tensor,
    v_head_stride: tl.tensor,
    k_heads: tl.tensor,
    k_rows: tl.tensor,
    k_row_stride: tl.tensor,
    k_row_head_stride: tl.tensor,
    v_rows: tl.tensor,
    v_row_stride: tl.tensor,
    v_row_head_stride: tl.tensor,
    position: tl.tensor,
    cos_sin_table: tl.tensor,
    index: tl.tensor,
    half: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    eps: tl.tensor,
    k_scale: tl.tensor | None,
    v_scale: tl.tensor | None,
    k_token_scale: tl.tensor | None,
    v_token_scale: tl.tensor | None,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    PAGE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Rotate the queries and keys of one token, and write its key and value to the cache. Grid: `(tokens,)`.

    1. Look up the token's cache row, and its row of the cosine and sine table.
    2. Normalise (NORM) and rotate the query heads, multiply them by k_scale, and store them.
    3. Normalise and rotate the key heads, divide them by k_scale or by their own scales, and store them in the cache.
    4. Divide the value heads by v_scale or by their own scales, and store them in the cache.

    q, rotated_q                  [tokens, q_heads, 2 × half], with strides between tokens and heads
    k, v                          [tokens, k_heads, 2 × half], with strides between tokens and heads
    k_rows, v_rows                [cache rows, k_heads, 2 × half], with strides between rows and heads
    position, index               [tokens], position of the token, and its cache row
    cos_sin_table                 float32 [positions, 2 × half], cosines and then sines
    q_weight, k_weight            [2 × half], weights of the RMS norm of heads
    k_scale, v_scale              float32 [k_heads], or None
    k_token_scale, v_token_scale  float32 [pages, k_heads, PAGE] of an int8 cache, written here, or None
    Q_HEADS, K_HEADS, HALF        q_heads, k_heads and half, rounded up to powers of two
    PDL                           this kernel may start before its predecessor ends
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(index + token).to(tl.int64)
    cos_sin = cos_sin_table + tl.load(position + token).to(tl.int64) * half * 2
    q += token * q_token_stride
    k += token * k_token_stride
    v += token * v_token_stride
    rotated_q_row = rotated_q + token * rotated_q_token_stride
    _rotate(
        *(q, q_head_stride, rotated_q_row, rotated_q_head_stride, q_heads, cos_sin, half, q_weight, eps),
        *(k_scale, q_heads // k_heads, None, row, PAGE, Q_HEADS, HALF, NORM, False),
    )
    _rotate(
        *(k, k_head_stride, k_rows + row * k_row_stride, k_row_head_stride, k_heads, cos_sin, half, k_weight, eps),
        *(k_scale, 1, k_token_scale, row, PAGE, K_HEADS, HALF, NORM, True),
    )
    copy_heads(
        *(v, v_head_stride, v_rows + row * v_row_stride, v_row_head_stride, k_heads, half * 2, v_scale),
        *(v_token_scale, row, PAGE, K_HEADS, HALF * 2),
    )


@triton.jit
def _rotate(
    source: tl.tensor,
    source_head_stride: tl.tensor,
    target: tl.tensor,
    target_head_stride: tl.tensor,
    heads: tl.tensor,
    cos_sin: tl.tensor,
    half: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    k_scale: tl.tensor | None,
    group: tl.tensor,
    token_scale: tl.tensor | None,
    row: tl.tensor,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    DIVIDE: tl.constexpr,
) -> None:
    """Rotate one token's heads from `source` to `target`; with NORM, apply the RMS norm to each head first.

    cos_sin      points to the token's `half` cosines, followed by its `half` sines
    k_scale      one float32 scale per key head: the result is multiplied by `k_scale[head // group]`, or divided with
                 DIVIDE; None: neither
    token_scale  per-token scales of an int8 cache: each head is divided by its own scale, which is stored for cache
                 row `row`; None: the target has another dtype
    """
    head, pair = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    mask = (head < heads) & (pair < half)
    cos = tl.load(cos_sin + pair, mask=pair < half, other=0.0)
    sin = tl.load(cos_sin + half + pair, mask=pair < half, other=0.0)
    source_ptr = source + head * source_head_stride + pair
    first = tl.load(source_ptr, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source_ptr + half, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = (1.0 / tl.sqrt_rn(squares / (2 * half) + eps))[:, None]
        first = first * scale * tl.load(weight + pair, mask=pair < half, other=0.0).to(tl.float32)
        second = second * scale * tl.load(weight + half + pair, mask=pair < half, other=0.0).to(tl.float32)
    if k_scale is not None:
        factor = tl.load(k_scale + head // group, mask=head < heads, other=1.0)
        if DIVIDE:
            factor = tl.div_rn(1.0, factor)
        first, second = first * factor, second * factor
    target_ptr = target + head * target_head_stride + pair
    if token_scale is not None:
        rotated_first, rotated_second = first * cos - second * sin, second * cos + first * sin
        absmax = tl.maximum(row_absmax(rotated_first), row_absmax(rotated_second), propagate_nan=tl.PropagateNan.ALL)
        inv_scale = store_token_scales(absmax, token_scale, row, heads, PAGE, HEADS)[:, None]
        tl.store(target_ptr, cast_to_target(rotated_first * inv_scale, target), mask=mask)
        tl.store(target_ptr + half, cast_to_target(rotated_second * inv_scale, target), mask=mask)
    else:
        tl.store(target_ptr, cast_to_target(first * cos - second * sin, target), mask=mask)
        tl.store(target_ptr + half, cast_to_target(second * cos + first * sin, target), mask=mask)
