"""Store partial attention results of query rows over disjoint key ranges, and merge them in one kernel.

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

from tok_kernels.attention.triton.operands import Operands
from tok_kernels.launch_config import pdl_options

# Partial results merged at a time: a step of many rows has few for each row, a step of few rows may have many.
_FEW_PARTIALS, _MANY_PARTIALS = 8, 64


@dataclass(frozen=True, slots=True)
class SplitKVPartials:
    """Partial results of R rows: `splits` of every row, then the chunks, of which a row may have any number.

    out      float32 [splits × R + chunks × stride, H, D]
    lse      float32 [splits × R + chunks × stride, H]
    chunks   int32   [R, 2]  entry of a row's first chunk, counted from the first entry of chunks, and its number of
                             chunks; unwritten ones are never read
    rows     R
    chunked  whether there are chunks
    stride   entries from a chunk of a row to the next one; with packs, those of other rows are between them

    For example, 2 splits of 3 rows: entries 0–2 are split 0 of rows 0–2, entries 3–5 are split 1, chunks begin at 6. If
    rows 0 and 1 are a pack of 2 chunks, and the stride is 2, entries 6 and 8 are chunks of row 0, 7 and 9 of row 1.
    """

    out: Tensor
    lse: Tensor
    chunks: Tensor
    rows: int
    splits: int
    chunked: bool
    stride: int = 1


def empty_partials(device: torch.device) -> SplitKVPartials:
    """Return a placeholder for kernels that neither read nor write partial results."""
    nothing = torch.empty((1, 1, 1), dtype=torch.float32, device=device)
    return SplitKVPartials(nothing, nothing, nothing, rows=1, splits=0, chunked=False)


def new_partials(q_RHD: Tensor, splits: int, *, chunks: int = 0, stride: int = 1, filled: bool) -> SplitKVPartials:
    """Allocate `splits` partial results for each row of q, and `chunks` chunks of `stride` rows.

    With `filled`, the partial results of all splits are marked as having no keys; otherwise they are undefined.
    """
    rows, heads, size = q_RHD.shape
    entries = splits * rows + chunks * stride
    out = torch.empty((entries, heads, size), dtype=torch.float32, device=q_RHD.device)
    lse = torch.empty((entries, heads), dtype=torch.float32, device=q_RHD.device)
    if filled and splits:
        lse[: splits * rows].fill_(-torch.inf)
    # Without chunks no kernel reads the table, so any tensor serves as its argument.
    table = torch.empty((rows, 2), dtype=torch.int32, device=q_RHD.device) if chunks else lse
    return SplitKVPartials(out, lse, table, rows, splits, chunks > 0, stride)


@triton.jit
def _merge_row(
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
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return the weighted mean of a row's `parts` partial results for one head, float32 `[PADDED]`; 0 without keys.

    `first` is the entry of the row's first chunk; BLOCK partial results are read at a time.
    """
    row_max = float("-inf")
    row_sum = 0.0
    acc = tl.zeros([PADDED], tl.float32)
    for begin in range(0, parts, BLOCK):
        part = begin + tl.arange(0, BLOCK)
        entry = tl.where(part < splits, part * rows + row, splits * rows + first + (part - splits) * STRIDE)
        head_row = entry.to(tl.int64) * HEADS + head
        lse = tl.load(part_lse_ptr + head_row, mask=part < parts, other=float("-inf"))
        seen = (lse > float("-inf"))[:, None] & (d < HEAD)[None, :]
        out = tl.load(part_out_ptr + head_row[:, None] * HEAD + d[None, :], mask=seen, other=0.0)
        peak = tl.maximum(row_max, tl.max(lse, 0))
        shift = tl.where(peak == float("-inf"), 0.0, peak)
        weight = tl.exp2(lse - shift)
        rescale = tl.exp2(row_max - shift)
        row_sum = row_sum * rescale + tl.sum(weight, 0)
        acc = acc * rescale + tl.sum(out * weight[:, None], 0)
        row_max = peak
    return acc / tl.where(row_sum > 0, row_sum, 1.0)


@triton.jit(do_not_specialize=["rows", "splits"])
def _merge_partials_kernel(
    out_ptr: tl.tensor,
    part_out_ptr: tl.tensor,
    part_lse_ptr: tl.tensor,
    chunks_ptr: tl.tensor,
    rows: tl.tensor,
    splits: tl.tensor,
    v_scale_ptr: tl.tensor | None,
    CHUNKED: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    PADDED: tl.constexpr,
    STRIDE: tl.constexpr,
    SMALL: tl.constexpr,
    LARGE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Merge the partial results of one row and head. Grid: `(rows × HEADS,)`.

    1. Find the row's partial results: one for each of `splits`, and those of its chunks (CHUNKED).
    2. Read SMALL or LARGE partial results at a time, and sum the outputs, weighted by the exponentials of their
       log-sum-exps.
    3. Divide by the sum of weights, multiply by `v_scale`, and store.

    out_ptr                     [rows, HEADS, HEAD], contiguous
    part_out_ptr, part_lse_ptr  float32 [entries, HEADS, HEAD] and [entries, HEADS], as in `SplitKVPartials`
    chunks_ptr                  int32 [rows, 2], `SplitKVPartials.chunks`
    STRIDE                      `SplitKVPartials.stride`
    v_scale_ptr                 float32 [KV_HEADS], or None
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
    if CHUNKED:
        first = tl.load(chunks_ptr + 2 * row)
        parts = splits + tl.load(chunks_ptr + 2 * row + 1)
    d = tl.arange(0, PADDED)
    if parts <= SMALL:
        merged = _merge_row(
            part_out_ptr, part_lse_ptr, row, head, rows, splits, first, parts, d, HEADS, HEAD, PADDED, STRIDE, SMALL
        )
    else:
        merged = _merge_row(
            part_out_ptr, part_lse_ptr, row, head, rows, splits, first, parts, d, HEADS, HEAD, PADDED, STRIDE, LARGE
        )
    if v_scale_ptr is not None:
        merged *= tl.load(v_scale_ptr + head // (HEADS // KV_HEADS))
    tl.store(out_ptr + head_row * HEAD + d, merged.to(out_ptr.dtype.element_ty), mask=d < HEAD)


def merge_partials(operands: Operands, parts: SplitKVPartials, out_RHD: Tensor) -> None:
    """Merge all partial results of each row into the contiguous `out_RHD`; zeros for rows without keys."""
    rows, heads, size = out_RHD.shape
    _merge_partials_kernel[(rows * heads,)](
        *(out_RHD, parts.out, parts.lse, parts.chunks, parts.rows, parts.splits, operands.cache.v_scale),
        CHUNKED=parts.chunked,
        HEADS=heads,
        KV_HEADS=operands.kv_heads,
        HEAD=size,
        PADDED=operands.padded_head,
        STRIDE=parts.stride,
        SMALL=_FEW_PARTIALS,
        LARGE=_MANY_PARTIALS,
        num_warps=4,
        **pdl_options(out_RHD.device),
    )
