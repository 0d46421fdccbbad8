"""Map floats to integers of the same order, so that a threshold is found by bisection in bounded time.

`SHIFT` is the number of low float32 bits that the logits' own dtype does not have: keys of bfloat16 are 16 bits wide.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ALL: tl.constexpr = tl.constexpr(0x7FFFFFFF)

_SHIFT = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


def shift_of(dtype: torch.dtype) -> int:
    """Return `SHIFT` for logits of float32, float16 or bfloat16."""
    return _SHIFT[dtype]


@triton.jit
def key_of(x: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """Return the int64 key of a value; both zeros have one key."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True) >> SHIFT
    return (bits ^ ((bits >> 31) & (_ALL >> SHIFT))).to(tl.int64)


@triton.jit
def value_of(key: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """Return the float32 value that has this key."""
    bits = key.to(tl.int32)
    return ((bits ^ ((bits >> 31) & (_ALL >> SHIFT))) << SHIFT).to(tl.float32, bitcast=True)
