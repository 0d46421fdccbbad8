"""Apply masks, penalties and biases of requests to their logits before sampling."""

from __future__ import annotations

import torch
from torch import Tensor

from tok_kernels.batch import Contexts, LogitBias, Masks, Penalties

# Upper bounds on the work of one pass, which limit the memory.
_ENTRIES = 1 << 25  # vocabulary entries of all rows whose tokens are counted
_MASKED_ROWS = 64  # rows whose masks are unpacked, from one bit to one byte per entry
_POSITIONS = 4096  # positions of a context whose tokens are counted


def forbid(logits_RV: Tensor, masks: Masks) -> None:
    """Set logits to −inf in place where their row's mask does not allow the token."""
    bit = torch.arange(8, dtype=torch.uint8, device=logits_RV.device)
    for begin in range(0, len(masks.rows), _MASKED_ROWS):
        rows = masks.rows[begin : begin + _MASKED_ROWS]
        octets = masks.words[masks.which[begin : begin + _MASKED_ROWS]].view(torch.uint8)
        allowed = (octets.unsqueeze(-1) >> bit & 1).flatten(1)[:, : logits_RV.shape[1]]
        logits_RV[rows] = logits_RV[rows].masked_fill_(allowed == 0, -torch.inf)


def apply_penalties(logits_RV: Tensor, penalties: Penalties) -> None:
    """Apply penalties to their rows in place: repetition first, then presence and frequency."""
    size = max(1, _ENTRIES // max(1, logits_RV.shape[1]))
    for start in range(0, len(penalties.rows), size):
        _penalise(logits_RV, penalties, slice(start, start + size))


def apply_bias(logits_RV: Tensor, bias: LogitBias) -> None:
    """Add biases to single logits in place; several biases of one logit add up."""
    logits_RV.index_put_((bias.row, bias.token), bias.value, accumulate=True)


def _penalise(logits_RV: Tensor, penalties: Penalties, part: slice) -> None:
    rows = penalties.rows[part]
    row = logits_RV.index_select(0, rows)
    in_prompt, in_output = _counts(penalties.contexts, part, logits_RV.shape[1])
    repetition = penalties.repetition_penalty[part].unsqueeze(-1)
    repeated = torch.where(row > 0, row / repetition, row * repetition)
    row = torch.where(in_prompt + in_output > 0, repeated, row)
    row -= penalties.presence_penalty[part].unsqueeze(-1) * (in_output > 0)
    row -= penalties.frequency_penalty[part].unsqueeze(-1) * in_output
    logits_RV.index_copy_(0, rows, row)


def _counts(contexts: Contexts, part: slice, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Count each token in the prompts and in the outputs of the rows of `part`: int32 `[r, V]` each."""
    slots, size = contexts.slots[part], contexts.page_size
    length, prompt_len = contexts.length[part].unsqueeze(1), contexts.prompt_len[part].unsqueeze(1)
    in_prompt, in_output = torch.zeros((2, len(slots), vocabulary), dtype=torch.int32, device=slots.device)
    for start in range(0, contexts.max_len, _POSITIONS):
        position = torch.arange(start, min(start + _POSITIONS, contexts.max_len), device=slots.device)
        page = contexts.page_table[slots][:, position // size].long()
        token = contexts.token_of[page * size + position % size]
        present, generated = position < length, position >= prompt_len
        in_output.scatter_add_(1, token, (present & generated).int())
        in_prompt.scatter_add_(1, token, (present & ~generated).int())
    return in_prompt, in_output
