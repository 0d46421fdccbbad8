"""Compute online softmax over a range of paged keys, for all attention kernels (Milakov & Gimelshein 2018).

Scores are multiplied by log2(e), so weights are powers of two.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class SoftmaxState(NamedTuple):
    """State of online softmax of some rows, float32.

    row_max  [ROWS], largest score so far; −inf before any key
    row_sum  [ROWS], sum of the weights relative to that score
    acc      [ROWS, PADDED], weighted sum of the values
    """

    row_max: tl.tensor
    row_sum: tl.tensor
    acc: tl.tensor


@triton.jit
def attend(
    q: tl.tensor,
    state: SoftmaxState,
    window_start: tl.tensor,
    limit: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    pages_ptr: tl.tensor,
    kv_page_stride: tl.tensor,
    kv_row_stride: tl.tensor,
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
) -> SoftmaxState:
    """Return the state of every row after the positions [begin, end).

    With MASKED, a row sees only positions below its `limit`; with WINDOWED as well, only those from its `window_start`
    on. Without MASKED, the number of positions is a multiple of KEYS. Positions from `end` on are not read from the
    cache. Pointers to per-token scales, if any, are those of the head in page 0.
    """
    row_max, row_sum, acc = state
    d = tl.arange(0, PADDED)
    for block in range(begin, end, KEYS):
        position = block + tl.arange(0, KEYS)
        if MASKED:
            inside = position < end
            page = tl.load(pages_ptr + position // PAGE, mask=inside, other=0).to(tl.int64)
        else:
            page = tl.load(pages_ptr + position // PAGE).to(tl.int64)
        offset = position % PAGE
        kv_offset = (page * kv_page_stride + offset * kv_row_stride)[:, None] + d[None, :]
        # Rows of the cache that were never written may hold NaN, and NaN times a weight of 0 is NaN.
        if MASKED:
            present = inside[:, None] & (d < HEAD)[None, :]
            k = tl.load(k_ptr + kv_offset, mask=present, other=0.0)
            v = tl.load(v_ptr + kv_offset, mask=present, other=0.0)
        elif HEAD == PADDED:
            k = tl.load(k_ptr + kv_offset)
            v = tl.load(v_ptr + kv_offset)
        else:
            k = tl.load(k_ptr + kv_offset, mask=(d < HEAD)[None, :], other=0.0)
            v = tl.load(v_ptr + kv_offset, mask=(d < HEAD)[None, :], other=0.0)
        score = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        if k_token_scale_ptr is not None:
            scale_offset = page * (KV_HEADS * PAGE) + offset
            if MASKED:
                k_scale = tl.load(k_token_scale_ptr + scale_offset, mask=inside, other=0.0)
                v_scale = tl.load(v_token_scale_ptr + scale_offset, mask=inside, other=0.0)
            else:
                k_scale = tl.load(k_token_scale_ptr + scale_offset)
                v_scale = tl.load(v_token_scale_ptr + scale_offset)
            score *= k_scale[None, :]
        if MASKED:
            score = tl.where(position[None, :] < limit[:, None], score, float("-inf"))
            if WINDOWED:
                # `limit` may lie beyond `end`: rows see those positions in a later call.
                seen = inside[None, :] & (position[None, :] >= window_start[:, None])
                score = tl.where(seen, score, float("-inf"))
        peak = tl.maximum(row_max, tl.max(score, 1) * scale)
        shift = tl.where(peak == float("-inf"), 0.0, peak)
        weight = tl.exp2(score * scale - shift[:, None])
        rescale = tl.exp2(row_max - shift)
        row_sum = row_sum * rescale + tl.sum(weight, 1)
        if v_token_scale_ptr is not None:
            weight *= v_scale[None, :]
            if q.dtype == tl.float16:  # products of weights and scales may underflow in float16
                weight *= 128.0
                v = v.to(tl.float16) * 0.0078125
        acc = tl.dot(weight.to(q.dtype), v.to(q.dtype), acc * rescale[:, None], input_precision="ieee")
        row_max = peak
    return SoftmaxState(row_max=row_max, row_sum=row_sum, acc=acc)


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
def empty_state(ROWS: tl.constexpr, PADDED: tl.constexpr) -> SoftmaxState:
    """Return the state before any key."""
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    return SoftmaxState(row_max=row_max, row_sum=row_sum, acc=tl.zeros([ROWS, PADDED], tl.float32))


@triton.jit
def load_partial(lse_at: tl.tensor, out_at: tl.tensor, present: tl.tensor, d_mask: tl.tensor) -> SoftmaxState:
    """Load a partial result as a state of online softmax; the empty state without `present` or without keys."""
    row_max = tl.load(lse_at, mask=present, other=float("-inf"))
    seen = row_max != float("-inf")  # a NaN log-sum-exp counts as seen and propagates
    acc = tl.load(out_at, mask=seen[:, None] & d_mask[None, :], other=0.0)
    return SoftmaxState(row_max=row_max, row_sum=tl.where(seen, 1.0, 0.0), acc=acc)


@triton.jit
def merge_states(state: SoftmaxState, other: SoftmaxState) -> SoftmaxState:
    """Merge the states of two disjoint ranges of keys."""
    peak = tl.maximum(state.row_max, other.row_max)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    rescale = tl.exp2(state.row_max - shift)
    other_rescale = tl.exp2(other.row_max - shift)
    row_sum = state.row_sum * rescale + other.row_sum * other_rescale
    acc = state.acc * rescale[:, None] + other.acc * other_rescale[:, None]
    return SoftmaxState(row_max=peak, row_sum=row_sum, acc=acc)


@triton.jit
def finish(state: SoftmaxState) -> tuple[tl.tensor, ...]:
    """Return the output and base-2 log-sum-exp of a state; zeros and −inf if no key was seen. NaN stays NaN."""
    seen = state.row_sum != 0
    divisor = tl.where(seen, state.row_sum, 1.0)
    out = tl.where(seen[:, None], state.acc / divisor[:, None], 0.0)
    return out, tl.where(seen, state.row_max + tl.log2(divisor), float("-inf"))
