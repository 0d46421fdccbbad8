"""Apply bitmasks of allowed tokens to logits in place: forbidden entries become −inf, and nothing else is written.

A block whose entries are all allowed is not accessed, and a block whose entries are all forbidden is not read.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tok_kernels.batch import Masks

WORDS, MASK_WARPS = 128, 4  # mask words (of 32 entries each) and warps per program


def forbid(logits_RV: Tensor, masks: Masks) -> None:
    """Set logits to −inf in place where their row's mask does not allow the token; the last axis must be dense."""
    vocabulary = logits_RV.shape[1]
    words, count = masks.words.contiguous(), len(masks.rows)
    if count:
        _mask_kernel[(count, triton.cdiv(vocabulary, WORDS * 32))](
            *(logits_RV, logits_RV.stride(0), masks.rows.contiguous(), masks.which.contiguous()),
            *(words, words.shape[1], vocabulary),
            WORDS=WORDS,
            num_warps=MASK_WARPS,
        )


@triton.jit(do_not_specialize_on_alignment=["rows", "which", "words"])
def _mask_kernel(
    logits: tl.tensor,
    stride: tl.tensor,
    rows: tl.tensor,
    which: tl.tensor,
    words: tl.tensor,
    width: tl.tensor,
    vocabulary: tl.tensor,
    WORDS: tl.constexpr,
) -> None:
    """Apply WORDS words of one row's mask, each of 32 entries."""
    nth = tl.program_id(0)
    row, mask = tl.load(rows + nth).to(tl.int64), tl.load(which + nth).to(tl.int64)
    first = tl.program_id(1) * WORDS
    word_at, bit = first + tl.arange(0, WORDS), tl.arange(0, 32)
    # Words past the end load as 0, which forbids their entries, but nothing is written past the vocabulary.
    word = tl.load(words + mask * width + word_at, mask=word_at < width, other=0)
    at = word_at[:, None] * 32 + bit[None, :]
    there = at < vocabulary
    line = logits + row * stride
    allowed = ((word[:, None] >> bit[None, :]) & 1) != 0
    forbidden = tl.full((WORDS, 32), -float("inf"), tl.float32).to(logits.dtype.element_ty)
    if tl.max((word != 0).to(tl.int32)) == 0:
        tl.store(line + at, forbidden, mask=there)
    elif tl.min(((word == -1) | (word_at >= width)).to(tl.int32)) == 0:
        x = tl.load(line + at, mask=there)
        tl.store(line + at, tl.where(allowed, x, forbidden), mask=there)
