"""Apply the norm of heads, rotary embedding and the cache write in one kernel, with one program per token."""
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
    copy_heads,
    dense_heads,
    largest_of,
    store_scales,
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

    The rotated queries replace `q_THD` in memory, or are a new tensor if elements of `dtype` have another size.
    `q_THD`, `k_TKD` and `v_TKD` may be views of one GEMM output, whose keys and values stay unchanged. Since values are
    rounded once, a rotated query may exceed the range of q's dtype (float16) if `dtype` (bfloat16) can hold it.

    Raises ValueError for queries whose last axis is not dense, and for norm weights of another length than that axis.
    """
    if q_THD.stride(-1) != 1:
        raise ValueError(f"q has a stride of {q_THD.stride(-1)} along its last axis; allowed: 1")
    q_weight, k_weight = _weights(q_THD, norm)
    dtype = dtype or q_THD.dtype
    if dtype.itemsize == q_THD.dtype.itemsize:
        rotated = q_THD.view(dtype)
    else:
        rotated = torch.empty(q_THD.shape, dtype=dtype, device=q_THD.device)
    if not q_THD.shape[0]:
        return rotated
    k, v, table = dense_heads(k_TKD), dense_heads(v_TKD), cos_sin_LD.contiguous()
    k_rows, v_rows = cache_rows(cache)
    _rope_and_write_kv_kernel[(q_THD.shape[0],)](
        *(q_THD, q_THD.stride(0), q_THD.stride(1), rotated, rotated.stride(0), rotated.stride(1), q_THD.shape[1]),
        *(k, k.stride(0), k.stride(1), v, v.stride(0), v.stride(1), k.shape[1]),
        *(k_rows, k_rows.stride(0), k_rows.stride(1), v_rows, v_rows.stride(0), v_rows.stride(1)),
        *(position_T.contiguous(), table, index_T.contiguous(), q_THD.shape[2] // 2),
        *(q_weight, k_weight, norm.eps if norm else 0.0, cache.k_scale, cache.v_scale, *token_scales(cache)),
        **_launch(q_THD, k),
        PAGE=cache.page_size,
        NORM=norm is not None,
        **pdl_options(q_THD.device),
    )
    return rotated


def _weights(q_THD: Tensor, norm: QKNorm | None) -> tuple[Tensor, Tensor]:
    """Return the norm's weights; without a norm, return placeholders, which the kernel does not read."""
    if norm is None:
        return q_THD, q_THD
    for name, weight in (("q", norm.q_D), ("k", norm.k_D)):
        if weight.shape != q_THD.shape[-1:]:
            raise ValueError(
                f"the norm's weight of {name} has shape {tuple(weight.shape)}; allowed: {(q_THD.shape[-1],)}"
            )
    return norm.q_D.contiguous(), norm.k_D.contiguous()


def _launch(q: Tensor, k: Tensor) -> dict[str, int]:
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
    q_token: tl.tensor,
    q_head: tl.tensor,
    rotated_q: tl.tensor,
    rotated_q_token: tl.tensor,
    rotated_q_head: tl.tensor,
    q_heads: tl.tensor,
    k: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    v: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    k_heads: tl.tensor,
    k_rows: tl.tensor,
    k_rows_row: tl.tensor,
    k_rows_head: tl.tensor,
    v_rows: tl.tensor,
    v_rows_row: tl.tensor,
    v_rows_head: tl.tensor,
    position: tl.tensor,
    table: tl.tensor,
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
    """Rotate the queries and keys of one token, and write its key and value to the cache."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(index + token).to(tl.int64)
    angle = table + tl.load(position + token).to(tl.int64) * half * 2
    q += token * q_token
    k += token * k_token
    v += token * v_token
    to_q = rotated_q + token * rotated_q_token
    _rotate(
        *(q, q_head, to_q, rotated_q_head, q_heads, angle, half, q_weight, eps, k_scale, q_heads // k_heads),
        *(None, row, PAGE, Q_HEADS, HALF, NORM, False),
    )
    _rotate(
        *(k, k_head, k_rows + row * k_rows_row, k_rows_head, k_heads, angle, half, k_weight, eps, k_scale, 1),
        *(k_token_scale, row, PAGE, K_HEADS, HALF, NORM, True),
    )
    copy_heads(
        *(v, v_head, v_rows + row * v_rows_row, v_rows_head, k_heads, half * 2, v_scale),
        *(v_token_scale, row, PAGE, K_HEADS, HALF * 2),
    )


@triton.jit
def _rotate(
    source: tl.tensor,
    source_head: tl.tensor,
    target: tl.tensor,
    target_head: tl.tensor,
    heads: tl.tensor,
    angle: tl.tensor,
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
    """Rotate the heads of one token; with NORM, normalise each head first.

    `angle` points to the token's `half` cosines, followed by its `half` sines. With `k_scale`, multiply the result by
    `k_scale[head // group]`, or with DIVIDE divide by it. With `token_scale`, the per-position scales of an int8 cache,
    compute the scales of the heads, divide the heads by them, and store the scales for cache row `row`.
    """
    head, pair = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (pair < half)
    cos = tl.load(angle + pair, mask=pair < half, other=0.0)
    sin = tl.load(angle + half + pair, mask=pair < half, other=0.0)
    at = source + head * source_head + pair
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
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
    to = target + head * target_head + pair
    if token_scale is not None:
        rotated_first, rotated_second = first * cos - second * sin, second * cos + first * sin
        largest = tl.maximum(largest_of(rotated_first), largest_of(rotated_second), propagate_nan=tl.PropagateNan.ALL)
        factor = store_scales(largest, token_scale, row, heads, PAGE, HEADS)[:, None]
        tl.store(to, cast_to_target(rotated_first * factor, target), mask=inside)
        tl.store(to + half, cast_to_target(rotated_second * factor, target), mask=inside)
    else:
        tl.store(to, cast_to_target(first * cos - second * sin, target), mask=inside)
        tl.store(to + half, cast_to_target(second * cos + first * sin, target), mask=inside)
