"""Partial results of query rows over disjoint ranges of keys, and the pass that joins them.

Log-sum-exps are of base 2, as the kernels' scores; −inf marks a part without keys, whose output is undefined.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# Parts joined at a time: where there are few, many rows are joined; where there are many, few.
_FEW, _MANY = 8, 64


@dataclass(frozen=True, slots=True)
class Parts:
    """`out` float32 `[parts, rows, H, D]` and `lse` float32 `[parts, rows, H]`."""

    out: Tensor
    lse: Tensor

    @property
    def rows(self) -> int:
        return self.lse.shape[1]


def no_parts(device: torch.device) -> Parts:
    """Stands where a kernel neither reads nor writes any."""
    nothing = torch.empty((1, 1, 1, 1), dtype=torch.float32, device=device)
    return Parts(nothing, nothing[0])


def new_parts(count: int, q_RHD: Tensor, filled: bool) -> Parts:
    """Room for `count` parts of each row; with `filled` none has seen a key yet, otherwise undefined."""
    rows, heads, size = q_RHD.shape
    out = torch.empty((count, rows, heads, size), dtype=torch.float32, device=q_RHD.device)
    lse = torch.empty((count, rows, heads), dtype=torch.float32, device=q_RHD.device)
    return Parts(out, lse.fill_(-torch.inf) if filled else lse)


@triton.jit
def _mean(
    part_out_ptr, part_lse_ptr, parts, lines, line, d, HEAD: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr
):
    top = float("-inf")
    total = 0.0
    acc = tl.zeros([PADDED], tl.float32)
    for first in range(0, parts, BLOCK):
        part = first + tl.arange(0, BLOCK)
        at = part.to(tl.int64) * lines + line
        lse = tl.load(part_lse_ptr + at, mask=part < parts, other=float("-inf"))
        seen = (lse > float("-inf"))[:, None] & (d < HEAD)[None, :]
        out = tl.load(part_out_ptr + at[:, None] * HEAD + d[None, :], mask=seen, other=0.0)
        peak = tl.maximum(top, tl.max(lse, 0))
        shift = tl.where(peak == float("-inf"), 0.0, peak)
        weight = tl.exp2(lse - shift)
        shrink = tl.exp2(top - shift)
        total = total * shrink + tl.sum(weight, 0)
        acc = acc * shrink + tl.sum(out * weight[:, None], 0)
        top = peak
    return acc / tl.where(total > 0, total, 1.0)


@triton.jit(do_not_specialize=["parts", "lines"])
def _merge(
    out_ptr,
    part_out_ptr,
    part_lse_ptr,
    parts,
    lines,
    HEAD: tl.constexpr,
    PADDED: tl.constexpr,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, PADDED)
    if parts <= FEW:
        mean = _mean(part_out_ptr, part_lse_ptr, parts, lines, line, d, HEAD, PADDED, FEW)
    else:
        mean = _mean(part_out_ptr, part_lse_ptr, parts, lines, line, d, HEAD, PADDED, MANY)
    tl.store(out_ptr + line * HEAD + d, mean.to(out_ptr.dtype.element_ty), mask=d < HEAD)


def merge(parts: Parts, out_RHD: Tensor, padded_head: int) -> None:
    """Joins all the parts of each row into `out`, which is contiguous; zeros where none has seen a key."""
    count, rows, heads, size = parts.out.shape
    _merge[(rows * heads,)](
        *(out_RHD, parts.out, parts.lse, count, rows * heads),
        HEAD=size,
        PADDED=padded_head,
        FEW=_FEW,
        MANY=_MANY,
        num_warps=4,
    )
