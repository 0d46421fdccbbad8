"""Apply bitmasks of allowed tokens to logits in place: entries of forbidden tokens become −inf.

Blocks without a forbidden token are neither read nor written, and blocks without an allowed token are only written.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tok_kernels.batch import Masks

WORDS, MASK_WARPS = 128, 4  # mask words (32 tokens each) and warps of a program


def apply_masks(logits_RV: Tensor, masks: Masks) -> None:
    """Set logits of tokens that their row's mask forbids to −inf, in place; rows must be contiguous."""
    vocabulary = logits_RV.shape[1]
    bitmask, count = masks.bitmask.contiguous(), len(masks.rows)
    if count:
        _mask_kernel[(count, triton.cdiv(vocabulary, WORDS * 32))](
            *(logits_RV, logits_RV.stride(0), masks.rows.contiguous(), masks.mask_index.contiguous()),
            *(bitmask, bitmask.shape[1], vocabulary),
            WORDS=WORDS,
            num_warps=MASK_WARPS,
        )


@triton.jit(do_not_specialize_on_alignment=["rows", "mask_index", "bitmask"])
def _mask_kernel(
    logits: tl.tensor,
    stride: tl.tensor,
    rows: tl.tensor,
    mask_index: tl.tensor,
    bitmask: tl.tensor,
    width: tl.tensor,
    vocabulary: tl.tensor,
    WORDS: tl.constexpr,
) -> None:
    """Apply WORDS words, of 32 tokens each, of one row's mask. Grid: `(r, ⌈vocabulary / (32 × WORDS)⌉)`.

    1. Load the words; words past the mask's end forbid their tokens.
    2. If they forbid all tokens, store −inf without reading the logits; if they allow all, do nothing.
    3. Otherwise load the logits, and store them with −inf for the forbidden tokens.

    logits            [R, vocabulary], with `stride` between rows, changed in place
    rows, mask_index  int64 [r], row of the logits, and row of `bitmask`
    bitmask           int32 [u, width]
    """
    mask_row = tl.program_id(0)
    row, mask = tl.load(rows + mask_row).to(tl.int64), tl.load(mask_index + mask_row).to(tl.int64)
    first = tl.program_id(1) * WORDS
    word_index, bit = first + tl.arange(0, WORDS), tl.arange(0, 32)
    # Words past the mask load as 0, which forbids their tokens; nothing is written past the vocabulary.
    word = tl.load(bitmask + mask * width + word_index, mask=word_index < width, other=0)
    entry = word_index[:, None] * 32 + bit[None, :]
    in_range = entry < vocabulary
    row_logits = logits + row * stride
    allowed = ((word[:, None] >> bit[None, :]) & 1) != 0
    forbidden = tl.full((WORDS, 32), -float("inf"), tl.float32).to(logits.dtype.element_ty)
    if tl.max((word != 0).to(tl.int32)) == 0:
        tl.store(row_logits + entry, forbidden, mask=in_range)
    elif tl.min(((word == -1) | (word_index >= width)).to(tl.int32)) == 0:
        x = tl.load(row_logits + entry, mask=in_range)
        tl.store(row_logits + entry, tl.where(allowed, x, forbidden), mask=in_range)
