"""Apply penalties to the tokens of a context only, so that the time is linear in the context's length.

A bitmap of the vocabulary records which tokens of a row have been seen. Of all positions that hold a token, the one
whose atomic update sets the token's bit changes the logit. Any of them may win, since all would change the logit alike.

The first pass handles generated tokens: repetition, then presence. The second pass handles tokens that only the prompt
holds, and the frequency of generated tokens. It adds equal numbers for a token, so their order does not change the sum.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tok_kernels.batch import Penalties

BLOCK, PENALTY_WARPS = 512, 4  # positions that a program handles at once, and its warps
_PROGRAMS = 1 << 14  # enough to fill a GPU; with more blocks than this, a program handles several of a context

# Arguments whose alignment depends on the number of rows, which must not recompile the kernels.
_UNALIGNED = ["entries", "slots", "lengths", "prompt_lens", "presence", "frequency", "repetition"]


def penalise(logits_RV: Tensor, penalties: Penalties, entry_R: Tensor) -> None:
    """Apply to each row, in place, the penalties at index `entry_R` (int64); −1: the row has none.

    `logits_RV` is float32 with a dense last axis. The formulas are those of `tok_kernels.sampling.reference.edits`,
    except that frequency is subtracted once for each occurrence.
    """
    contexts, (rows, vocabulary) = penalties.contexts, logits_RV.shape
    if not rows:
        return
    blocks = triton.cdiv(contexts.max_len, BLOCK)
    grid = rows, max(1, min(blocks, _PROGRAMS // rows))
    met = torch.zeros((rows, triton.cdiv(vocabulary, 32)), dtype=torch.int32, device=logits_RV.device)
    table = contexts.page_table
    for once in (True, False):
        _penalise_kernel[grid](
            *(logits_RV, logits_RV.stride(0), met, met.stride(0), entry_R),
            *(table, table.stride(0), contexts.token_of, contexts.page_size),
            *(x.contiguous() for x in (contexts.slots, contexts.length, contexts.prompt_len)),
            *(
                x.contiguous()
                for x in (penalties.presence_penalty, penalties.frequency_penalty, penalties.repetition_penalty)
            ),
            ONCE=once,
            BLOCK=BLOCK,
            num_warps=PENALTY_WARPS,
        )


# The width of the page table differs between the state that the start measures and the one that runs.
@triton.jit(do_not_specialize=["pages"], do_not_specialize_on_alignment=_UNALIGNED)
def _penalise_kernel(
    logits: tl.tensor,
    stride: tl.tensor,
    met: tl.tensor,
    words: tl.tensor,
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
    ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Apply one of the two passes to BLOCK positions of a row at a time.

    With ONCE, apply repetition and then presence, once to each generated token. Otherwise apply repetition to tokens
    that only the prompt holds, and frequency to generated tokens; no token is both.
    """
    row = tl.program_id(0).to(tl.int64)
    entry = tl.load(entries + row)
    if entry >= 0:
        repeat, present = tl.load(repetition + entry), tl.load(presence + entry)
        frequent = tl.load(frequency + entry)
        end = tl.load(lengths + entry).to(tl.int32)
        prompt = tl.minimum(tl.load(prompt_lens + entry).to(tl.int32), end)
        if ONCE:
            first = tl.where((repeat == 1) & (present == 0), end, prompt)
        else:
            first = tl.where(repeat == 1, prompt, 0)
            end = tl.where(frequent == 0, prompt, end)
        table = page_table + tl.load(slots + entry) * pages
        line, seen = logits + row * stride, met + row * words
        for start in range(first + tl.program_id(1) * BLOCK, end, tl.num_programs(1) * BLOCK):
            position = start + tl.arange(0, BLOCK)
            there = position < end
            token = _token_at(table, token_of, page_size, position, there)
            new = _claim_token(seen, token, there if ONCE else there & (position < prompt))
            x = tl.load(line + token, mask=new, other=0.0)
            x = tl.where(x > 0, tl.div_rn(x, repeat), x * repeat)
            tl.store(line + token, x - present if ONCE else x, mask=new)
            if not ONCE:
                less = tl.zeros((BLOCK,), tl.float32) - frequent
                tl.atomic_add(line + token, less, mask=there & (position >= prompt), sem="relaxed")


@triton.jit
def _token_at(
    table: tl.tensor, token_of: tl.tensor, page_size: tl.tensor, position: tl.tensor, there: tl.tensor
) -> tl.tensor:
    """Return the tokens at the positions of a context."""
    page = tl.load(table + position // page_size, mask=there, other=0).to(tl.int64)
    return tl.load(token_of + page * page_size + position % page_size, mask=there, other=0)


@triton.jit
def _claim_token(seen: tl.tensor, token: tl.tensor, there: tl.tensor) -> tl.tensor:
    """Return whether each position is the first of those that hold its token to set the token's bit."""
    bit = tl.full(token.shape, 1, tl.int32) << (token % 32).to(tl.int32)
    before = tl.atomic_or(seen + token // 32, bit, mask=there, sem="relaxed")
    return there & ((before & bit) == 0)
