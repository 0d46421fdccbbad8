"""Store partial attention results of query rows over disjoint key ranges, and merge them.

Log-sum-exps are of base 2, like the kernels' scores. A log-sum-exp of −inf marks a partial result without keys, whose
output is undefined. Outputs are sums of numbers as the cache holds them: only final results are multiplied by the
scales of values. Axes: R query rows, H query heads, D head size.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tok_kernels.attention.triton.online_softmax import SoftmaxState, empty_state, finish
from tok_kernels.attention.triton.operands import Operands
from tok_kernels.launch_config import pdl_options

# Partial results that the merging kernel reads at a time: rows have few in a step of many rows, and may have many
# otherwise.
_FEW_PARTIALS, _MANY_PARTIALS = 8, 128
_MAX_READ_ELEMENTS = 16384  # elements of these


@dataclass(frozen=True, slots=True)
class SplitKVPartials:
    """Partial results of R rows: `splits` of every row, then the chunks, of which a row may have any number.

    out     float32 [splits × R + chunks × stride, H, D]
    lse     float32 [splits × R + chunks × stride, H]
    chunks  int32   [R, 2]  entry of a row's first chunk, counted from the first entry of chunks, and its number of
                            chunks; None: no kernel reads the chunks after the one that writes them
    rows    R
    stride  entries from a chunk of a row to the next one; with packs, those of other rows are between them

    For example, 2 splits of 3 rows: entries 0–2 are split 0 of rows 0–2, entries 3–5 are split 1, chunks begin at 6. If
    rows 0 and 1 are a pack of 2 chunks, and the stride is 2, entries 6 and 8 are chunks of row 0, 7 and 9 of row 1.
    """

    out: Tensor
    lse: Tensor
    chunks: Tensor | None
    rows: int
    splits: int
    stride: int = 1


def empty_partials(device: torch.device) -> SplitKVPartials:
    """Return a placeholder for kernels that neither read nor write partial results."""
    nothing = torch.empty((1, 1, 1), dtype=torch.float32, device=device)
    return SplitKVPartials(nothing, nothing, None, rows=1, splits=0)


def new_partials(
    q_RHD: Tensor, splits: int, *, chunks: int = 0, stride: int = 1, table: bool = False, filled: bool
) -> SplitKVPartials:
    """Allocate `splits` partial results for each row of q, and `chunks` chunks of `stride` rows.

    With `table`, `SplitKVPartials.chunks` is allocated. With `filled`, the partial results of all splits are marked as
    having no keys; otherwise they are undefined.
    """
    rows, heads, size = q_RHD.shape
    entries = splits * rows + chunks * stride
    out = torch.empty((entries, heads, size), dtype=torch.float32, device=q_RHD.device)
    lse = torch.empty((entries, heads), dtype=torch.float32, device=q_RHD.device)
    if filled and splits:
        lse[: splits * rows].fill_(-torch.inf)
    chunk_table = torch.empty((rows, 2), dtype=torch.int32, device=q_RHD.device) if table else None
    return SplitKVPartials(out, lse, chunk_table, rows, splits, stride)


@triton.jit
def _merge(
    part_out_ptr: tl.tensor,
    part_lse_ptr: tl.tensor,
    entry: tl.tensor,
    head: tl.tensor,
    present: tl.tensor,
    state: SoftmaxState,
    d: tl.tensor,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
) -> SoftmaxState:
    """Merge partial results into the state of some rows.

    entry, present  [PARTS, ROWS], entries of the partial results of each row; those not present have no keys
    head            [ROWS], query head of each row
    """
    head_row = entry.to(tl.int64) * HEADS + head[None, :]
    lse = tl.load(part_lse_ptr + head_row, mask=present, other=float("-inf"), cache_modifier=".cg")
    seen = (lse > float("-inf"))[:, :, None] & (d < HEAD)[None, None, :]
    out = tl.load(
        part_out_ptr + head_row[:, :, None] * HEAD + d[None, None, :], mask=seen, other=0.0, cache_modifier=".cg"
    )
    peak = tl.maximum(state.row_max, tl.max(lse, 0))
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    weight = tl.exp2(lse - shift[None, :])
    rescale = tl.exp2(state.row_max - shift)
    row_sum = state.row_sum * rescale + tl.sum(weight, 0)
    acc = state.acc * rescale[:, None] + tl.sum(out * weight[:, :, None], 0)
    return SoftmaxState(row_max=peak, row_sum=row_sum, acc=acc)


@triton.jit
def merge_row(
    out_ptr: tl.tensor,
    part_out_ptr: tl.tensor,
    part_lse_ptr: tl.tensor,
    row: tl.tensor,
    kv_head: tl.tensor,
    grouped: tl.tensor,
    first_chunk: tl.tensor,
    chunk_count: tl.tensor,
    splits: tl.tensor,
    split_rows: tl.tensor,
    v_scale_ptr: tl.tensor | None,
    HEAD: tl.constexpr,
    PADDED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Merge the splits and chunks of a row for one key/value head, and store the outputs.

    Partial results are read PARTS at a time, in a fixed order. HEADS is GROUP, padded to a power of two; a row that is
    not `grouped` has no splits. The decode kernel describes the other arguments.
    """
    query = tl.arange(0, HEADS)
    head = kv_head * GROUP + query
    present = query < GROUP
    d = tl.arange(0, PADDED)
    state = empty_state(HEADS, PADDED)
    for begin in range(0, splits + chunk_count, PARTS):
        part = begin + tl.arange(0, PARTS)[:, None]
        is_split = part < splits
        entry = tl.where(is_split, part * split_rows + row, splits * split_rows + first_chunk + part - splits)
        exists = (part < splits + chunk_count) & (grouped | ~is_split) & present[None, :]
        state = _merge(part_out_ptr, part_lse_ptr, entry, head, exists, state, d, KV_HEADS * GROUP, HEAD)
    out, _ = finish(state)
    if v_scale_ptr is not None:
        out *= tl.load(v_scale_ptr + kv_head)
    offset = (row * (KV_HEADS * GROUP) + head)[:, None] * HEAD + d[None, :]
    tl.store(out_ptr + offset, out.to(out_ptr.dtype.element_ty), mask=present[:, None] & (d < HEAD)[None, :])


@triton.jit
def _merge_row_and_head(
    part_out_ptr: tl.tensor,
    part_lse_ptr: tl.tensor,
    row: tl.tensor,
    head: tl.tensor,
    rows: tl.tensor,
    splits: tl.tensor,
    first: tl.tensor,
    parts: tl.tensor,
    d: tl.tensor,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    PADDED: tl.constexpr,
    STRIDE: tl.constexpr,
    PARTS: tl.constexpr,
) -> tl.tensor:
    """Return the merged output of one row and head, float32 `[1, PADDED]`.

    `first` is the entry of the row's first chunk. The row's `parts` partial results are read PARTS at a time.
    """
    state = empty_state(1, PADDED)
    heads = tl.full([1], 0, tl.int64) + head
    for begin in range(0, parts, PARTS):
        part = begin + tl.arange(0, PARTS)[:, None]
        entry = tl.where(part < splits, part * rows + row, splits * rows + first + (part - splits) * STRIDE)
        state = _merge(part_out_ptr, part_lse_ptr, entry, heads, part < parts, state, d, HEADS, HEAD)
    return finish(state)[0]


@triton.jit(do_not_specialize=["rows", "splits"])
def _merge_partials_kernel(
    out_ptr: tl.tensor,
    part_out_ptr: tl.tensor,
    part_lse_ptr: tl.tensor,
    chunks_ptr: tl.tensor | None,
    rows: tl.tensor,
    splits: tl.tensor,
    v_scale_ptr: tl.tensor | None,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    PADDED: tl.constexpr,
    STRIDE: tl.constexpr,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Merge the partial results of one row and head. Grid: `(rows × HEADS,)`.

    1. Find the row's partial results: one for each of `splits`, and those of its chunks.
    2. Read FEW or MANY partial results at a time, and sum the outputs, weighted by the exponentials of their
       log-sum-exps.
    3. Divide by the sum of weights, multiply by `v_scale`, and store.

    out_ptr                     [rows, HEADS, HEAD], contiguous
    part_out_ptr, part_lse_ptr  float32 [entries, HEADS, HEAD] and [entries, HEADS], as in `SplitKVPartials`
    chunks_ptr                  int32 [rows, 2], `SplitKVPartials.chunks`; None: there are no chunks
    STRIDE                      `SplitKVPartials.stride`
    v_scale_ptr                 float32 [KV_HEADS], or None
    FEW, MANY                   partial results that are read at a time if the row has at most FEW, or more
    PDL                         this kernel may start before its predecessor ends
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    head_row = tl.program_id(0).to(tl.int64)
    row = (head_row // HEADS).to(tl.int32)
    head = head_row % HEADS
    first = 0
    parts = splits
    if chunks_ptr is not None:
        first = tl.load(chunks_ptr + 2 * row)
        parts = splits + tl.load(chunks_ptr + 2 * row + 1)
    d = tl.arange(0, PADDED)
    if parts <= FEW:
        out = _merge_row_and_head(
            part_out_ptr, part_lse_ptr, row, head, rows, splits, first, parts, d, HEADS, HEAD, PADDED, STRIDE, FEW
        )
    else:
        out = _merge_row_and_head(
            part_out_ptr, part_lse_ptr, row, head, rows, splits, first, parts, d, HEADS, HEAD, PADDED, STRIDE, MANY
        )
    if v_scale_ptr is not None:
        out *= tl.load(v_scale_ptr + head // (HEADS // KV_HEADS))
    tl.store(out_ptr + head_row * HEAD + d[None, :], out.to(out_ptr.dtype.element_ty), mask=(d < HEAD)[None, :])


def merge_partials(operands: Operands, parts: SplitKVPartials, out_RHD: Tensor) -> None:
    """Merge all partial results of each row into the contiguous `out_RHD`; zeros for rows without keys."""
    rows, heads, size = out_RHD.shape
    _merge_partials_kernel[(rows * heads,)](
        *(out_RHD, parts.out, parts.lse, parts.chunks, parts.rows, parts.splits, operands.cache.v_scale),
        HEADS=heads,
        KV_HEADS=operands.kv_heads,
        HEAD=size,
        PADDED=operands.padded_head,
        STRIDE=parts.stride,
        FEW=_FEW_PARTIALS,
        MANY=min(_MANY_PARTIALS, _MAX_READ_ELEMENTS // operands.padded_head),
        num_warps=4,
        **pdl_options(out_RHD.device),
    )
