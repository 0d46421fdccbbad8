"""Compute online softmax over a range of paged keys, for all attention kernels (Milakov & Gimelshein 2018).

Scores are in units of log 2, so weights are powers of two. The state of a row is (top, total, acc): its largest score
so far, the sum of its weights relative to that score, and its weighted sum of values.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend(
    q: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    first: tl.tensor,
    limit: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    pages_ptr: tl.tensor,
    kv_page: tl.tensor,
    kv_row: tl.tensor,
    scale: tl.tensor,
    k_token_scale_ptr: tl.tensor | None,
    v_token_scale_ptr: tl.tensor | None,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    HEAD: tl.constexpr,
    PADDED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Return the state of every row after the positions [begin, end).

    With MASKED, a row sees only positions below its `limit`; with WINDOWED as well, only those from its `first` on.
    Without MASKED, the number of positions is a multiple of KEYS. Positions from `end` on are not read from the cache.
    Pointers to scales of positions, if any, are those of the head in page 0.
    """
    d = tl.arange(0, PADDED)
    for block in range(begin, end, KEYS):
        position = block + tl.arange(0, KEYS)
        if MASKED:
            inside = position < end
            page = tl.load(pages_ptr + position // PAGE, mask=inside, other=0).to(tl.int64)
        else:
            page = tl.load(pages_ptr + position // PAGE).to(tl.int64)
        offset = position % PAGE
        at = (page * kv_page + offset * kv_row)[:, None] + d[None, :]
        # An unwritten cache row may hold NaN, which a weight of zero would not remove.
        if MASKED:
            present = inside[:, None] & (d < HEAD)[None, :]
            k = tl.load(k_ptr + at, mask=present, other=0.0)
            v = tl.load(v_ptr + at, mask=present, other=0.0)
        elif HEAD == PADDED:
            k = tl.load(k_ptr + at)
            v = tl.load(v_ptr + at)
        else:
            k = tl.load(k_ptr + at, mask=(d < HEAD)[None, :], other=0.0)
            v = tl.load(v_ptr + at, mask=(d < HEAD)[None, :], other=0.0)
        score = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        if k_token_scale_ptr is not None:
            scale_at = page * (KV_HEADS * PAGE) + offset
            if MASKED:
                k_scale = tl.load(k_token_scale_ptr + scale_at, mask=inside, other=0.0)
                v_scale = tl.load(v_token_scale_ptr + scale_at, mask=inside, other=0.0)
            else:
                k_scale = tl.load(k_token_scale_ptr + scale_at)
                v_scale = tl.load(v_token_scale_ptr + scale_at)
            score *= k_scale[None, :]
        if MASKED:
            score = tl.where(position[None, :] < limit[:, None], score, float("-inf"))
            if WINDOWED:
                # `limit` may lie beyond `end`: rows see those positions in a later call.
                seen = inside[None, :] & (position[None, :] >= first[:, None])
                score = tl.where(seen, score, float("-inf"))
        peak = tl.maximum(top, tl.max(score, 1) * scale)
        shift = tl.where(peak == float("-inf"), 0.0, peak)
        weight = tl.exp2(score * scale - shift[:, None])
        shrink = tl.exp2(top - shift)
        total = total * shrink + tl.sum(weight, 1)
        if v_token_scale_ptr is not None:
            weight *= v_scale[None, :]
            if q.dtype == tl.float16:  # has no numbers as small as many products of weights and scales
                weight *= 128.0
                v = v.to(tl.float16) * 0.0078125
        acc = tl.dot(weight.to(q.dtype), v.to(q.dtype), acc * shrink[:, None], input_precision="ieee")
        top = peak
    return top, total, acc


@triton.jit
def cast_queries(q: tl.tensor, FP16: tl.constexpr) -> tl.tensor:
    """Return the queries in the dtype of the matmul.

    With FP16 they are clamped to float16's range and converted; NaN stays NaN.
    """
    if FP16:
        q = q.to(tl.float32)
        q = tl.where(q > 65504.0, 65504.0, tl.where(q < -65504.0, -65504.0, q)).to(tl.float16)
    return q


@triton.jit
def empty_state(ROWS: tl.constexpr, PADDED: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Return the state before any key."""
    top = tl.full([ROWS], float("-inf"), tl.float32)
    return top, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, PADDED], tl.float32)


@triton.jit
def resume(lse_at: tl.tensor, out_at: tl.tensor, present: tl.tensor, d_present: tl.tensor) -> tuple[tl.tensor, ...]:
    """Return the state of online softmax of a partial result; the empty state without `present` or without keys."""
    top = tl.load(lse_at, mask=present, other=float("-inf"))
    seen = top != float("-inf")  # a NaN log-sum-exp counts as seen and propagates
    acc = tl.load(out_at, mask=seen[:, None] & d_present[None, :], other=0.0)
    return top, tl.where(seen, 1.0, 0.0), acc


@triton.jit
def join(
    top: tl.tensor, total: tl.tensor, acc: tl.tensor, other_top: tl.tensor, other_total: tl.tensor, other_acc: tl.tensor
) -> tuple[tl.tensor, ...]:
    """Return the state over the keys of two states."""
    peak = tl.maximum(top, other_top)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    shrink = tl.exp2(top - shift)
    other_shrink = tl.exp2(other_top - shift)
    total = total * shrink + other_total * other_shrink
    return peak, total, acc * shrink[:, None] + other_acc * other_shrink[:, None]


@triton.jit
def finish(top: tl.tensor, total: tl.tensor, acc: tl.tensor) -> tuple[tl.tensor, ...]:
    """Return the output and base-2 log-sum-exp of a state; zeros and −inf if no key was seen. NaN stays NaN."""
    seen = total != 0
    divisor = tl.where(seen, total, 1.0)
    out = tl.where(seen[:, None], acc / divisor[:, None], 0.0)
    return out, tl.where(seen, top + tl.log2(divisor), float("-inf"))
