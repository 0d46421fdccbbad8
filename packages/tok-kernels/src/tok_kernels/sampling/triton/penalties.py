"""Apply penalties to the tokens of each row's context, in time linear in the context's length.

A token may occur at several positions, but its penalty applies once. A bitmap of the vocabulary records the tokens seen
in a row: the position whose atomic OR first sets the token's bit changes the logit.

The first pass applies repetition and then presence penalties to generated tokens. The second pass applies repetition
penalties to tokens that occur only in the prompt, and frequency penalties to generated tokens. Frequency penalties are
atomic additions of equal numbers, so their order does not change the sum.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tok_kernels.batch import Penalties

BLOCK, PENALTY_WARPS = 512, 4  # positions that a program handles at once, and its warps
_TARGET_PROGRAMS = 1 << 14  # fills a GPU; with more blocks of positions than this, a program handles several

# Arguments whose alignment depends on the number of rows, which must not recompile the kernels.
_UNALIGNED = ["entries", "slots", "lengths", "prompt_lens", "presence", "frequency", "repetition"]


def apply_penalties(logits_RV: Tensor, penalties: Penalties, entry_R: Tensor) -> None:
    """Apply penalties to rows in place: row i has those at index `entry_R[i]` (int64) of `penalties`; −1: none.

    `logits_RV` is float32 with contiguous rows. Formulas are those of `tok_kernels.sampling.reference.edits`, except
    that the frequency penalty is subtracted once per occurrence, with a rounding each.
    """
    contexts, (rows, vocabulary) = penalties.contexts, logits_RV.shape
    if not rows:
        return
    blocks = triton.cdiv(contexts.max_len, BLOCK)
    grid = rows, max(1, min(blocks, _TARGET_PROGRAMS // rows))
    seen = torch.zeros((rows, triton.cdiv(vocabulary, 32)), dtype=torch.int32, device=logits_RV.device)
    table = contexts.page_table
    factors = penalties.presence_penalty, penalties.frequency_penalty, penalties.repetition_penalty
    for first_pass in (True, False):
        _apply_penalties_kernel[grid](
            *(logits_RV, logits_RV.stride(0), seen, seen.stride(0), entry_R),
            *(table, table.stride(0), contexts.token_of, contexts.page_size),
            *(x.contiguous() for x in (contexts.slots, contexts.length, contexts.prompt_len)),
            *(x.contiguous() for x in factors),
            FIRST_PASS=first_pass,
            BLOCK=BLOCK,
            num_warps=PENALTY_WARPS,
        )


# The page table of the memory profile at startup has another width than the one that serves.
@triton.jit(do_not_specialize=["pages"], do_not_specialize_on_alignment=_UNALIGNED)
def _apply_penalties_kernel(
    logits: tl.tensor,
    stride: tl.tensor,
    seen: tl.tensor,
    words_per_row: tl.tensor,
    entries: tl.tensor,
    page_table: tl.tensor,
    pages: tl.tensor,
    token_of: tl.tensor,
    page_size: tl.tensor,
    slots: tl.tensor,
    lengths: tl.tensor,
    prompt_lens: tl.tensor,
    presence: tl.tensor,
    frequency: tl.tensor,
    repetition: tl.tensor,
    FIRST_PASS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Apply one of the two passes to every `num_programs(1)`-th block of BLOCK positions of a row.

    Grid: `(R, programs per row)`. With FIRST_PASS, apply repetition and then presence to generated tokens. Otherwise
    apply repetition to tokens that occur only in the prompt, and frequency to generated tokens.

    logits                  float32 [R, vocabulary], with `stride` between rows, changed in place
    seen                    int32 [R, words_per_row], bitmap of the tokens seen; zeros before the first pass
    entries                 int64 [R], index of the row in the arrays of `Penalties`; −1: no penalties
    page_table              int32 [slots, pages]
    token_of                int64 [cache rows], token of each cache row
    slots to prompt_lens    int64 [r], columns of `Contexts`
    presence to repetition  float32 [r], columns of `Penalties`
    """
    row = tl.program_id(0).to(tl.int64)
    entry = tl.load(entries + row)
    if entry >= 0:
        repetition_penalty, presence_penalty = tl.load(repetition + entry), tl.load(presence + entry)
        frequency_penalty = tl.load(frequency + entry)
        end = tl.load(lengths + entry).to(tl.int32)
        prompt_end = tl.minimum(tl.load(prompt_lens + entry).to(tl.int32), end)
        if FIRST_PASS:
            first = tl.where((repetition_penalty == 1) & (presence_penalty == 0), end, prompt_end)
        else:
            first = tl.where(repetition_penalty == 1, prompt_end, 0)
            end = tl.where(frequency_penalty == 0, prompt_end, end)
        table = page_table + tl.load(slots + entry) * pages
        row_logits, row_seen = logits + row * stride, seen + row * words_per_row
        for start in range(first + tl.program_id(1) * BLOCK, end, tl.num_programs(1) * BLOCK):
            position = start + tl.arange(0, BLOCK)
            in_range = position < end
            token = _token_at(table, token_of, page_size, position, in_range)
            is_first = _claim_token(row_seen, token, in_range if FIRST_PASS else in_range & (position < prompt_end))
            logit = tl.load(row_logits + token, mask=is_first, other=0.0)
            logit = tl.where(logit > 0, tl.div_rn(logit, repetition_penalty), logit * repetition_penalty)
            tl.store(row_logits + token, logit - presence_penalty if FIRST_PASS else logit, mask=is_first)
            if not FIRST_PASS:
                decrement = tl.zeros((BLOCK,), tl.float32) - frequency_penalty
                tl.atomic_add(row_logits + token, decrement, mask=in_range & (position >= prompt_end), sem="relaxed")


@triton.jit
def _token_at(
    table: tl.tensor, token_of: tl.tensor, page_size: tl.tensor, position: tl.tensor, in_range: tl.tensor
) -> tl.tensor:
    """Return the tokens at positions of a context, int64."""
    page = tl.load(table + position // page_size, mask=in_range, other=0).to(tl.int64)
    return tl.load(token_of + page * page_size + position % page_size, mask=in_range, other=0)


@triton.jit
def _claim_token(row_seen: tl.tensor, token: tl.tensor, in_range: tl.tensor) -> tl.tensor:
    """Set the bits of tokens in the bitmap; return for each position whether it set its token's bit."""
    bit = tl.full(token.shape, 1, tl.int32) << (token % 32).to(tl.int32)
    previous = tl.atomic_or(row_seen + token // 32, bit, mask=in_range, sem="relaxed")
    return in_range & ((previous & bit) == 0)
