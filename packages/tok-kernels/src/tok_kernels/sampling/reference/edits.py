"""Apply masks, penalties and biases to logits before sampling, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from tok_kernels.batch import Contexts, LogitBias, Masks, Penalties

# Bounds on the work of one pass, which limit the memory.
_MAX_COUNTED_ENTRIES = 1 << 25  # rows × vocabulary entries for which tokens are counted
_MAX_MASKED_ROWS = 64  # rows whose masks are unpacked from bits to bytes
_MAX_COUNTED_POSITIONS = 4096  # positions of each context


def apply_masks(logits_RV: Tensor, masks: Masks) -> None:
    """Set logits of tokens that their row's mask forbids to −inf, in place."""
    bit = torch.arange(8, dtype=torch.uint8, device=logits_RV.device)
    for begin in range(0, len(masks.rows), _MAX_MASKED_ROWS):
        rows = masks.rows[begin : begin + _MAX_MASKED_ROWS]
        mask_bytes = masks.bitmask[masks.mask_index[begin : begin + _MAX_MASKED_ROWS]].view(torch.uint8)
        allowed = (mask_bytes.unsqueeze(-1) >> bit & 1).flatten(1)[:, : logits_RV.shape[1]]
        logits_RV[rows] = logits_RV[rows].masked_fill_(allowed == 0, -torch.inf)


def apply_penalties(logits_RV: Tensor, penalties: Penalties) -> None:
    """Apply penalties to their rows of float32 logits in place: repetition first, then presence and frequency."""
    size = max(1, _MAX_COUNTED_ENTRIES // max(1, logits_RV.shape[1]))
    for start in range(0, len(penalties.rows), size):
        _apply_penalties(logits_RV, penalties, slice(start, start + size))


def apply_bias(logits_RV: Tensor, bias: LogitBias) -> None:
    """Add biases to single float32 logits in place; several biases of one logit add up."""
    logits_RV.index_put_((bias.row, bias.token), bias.value, accumulate=True)


def _apply_penalties(logits_RV: Tensor, penalties: Penalties, chunk: slice) -> None:
    """Apply the entries `chunk` of the penalties."""
    rows = penalties.rows[chunk]
    edited = logits_RV.index_select(0, rows)
    in_prompt, in_output = _count_tokens(penalties.contexts, chunk, logits_RV.shape[1])
    repetition = penalties.repetition_penalty[chunk].unsqueeze(-1)
    repeated = torch.where(edited > 0, edited / repetition, edited * repetition)
    edited = torch.where(in_prompt + in_output > 0, repeated, edited)
    edited -= penalties.presence_penalty[chunk].unsqueeze(-1) * (in_output > 0)
    edited -= penalties.frequency_penalty[chunk].unsqueeze(-1) * in_output
    logits_RV.index_copy_(0, rows, edited)


def _count_tokens(contexts: Contexts, chunk: slice, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return how often each token occurs in the prompts and in the outputs of the contexts `chunk`: int32 `[r, V]`."""
    slots, size = contexts.slots[chunk], contexts.page_size
    length, prompt_len = contexts.length[chunk].unsqueeze(1), contexts.prompt_len[chunk].unsqueeze(1)
    in_prompt, in_output = torch.zeros((2, len(slots), vocabulary), dtype=torch.int32, device=slots.device)
    for start in range(0, contexts.max_len, _MAX_COUNTED_POSITIONS):
        position = torch.arange(start, min(start + _MAX_COUNTED_POSITIONS, contexts.max_len), device=slots.device)
        page = contexts.page_table[slots][:, position // size].long()
        token = contexts.token_of[page * size + position % size]
        in_context, is_output = position < length, position >= prompt_len
        in_output.scatter_add_(1, token, (in_context & is_output).int())
        in_prompt.scatter_add_(1, token, (in_context & ~is_output).int())
    return in_prompt, in_output
