"""What a request does to its logits before the draw: penalties and biases."""

from __future__ import annotations

import torch
from torch import Tensor

from tok_kernels.batch import Contexts, LogitBias, Penalties

_ENTRIES = 1 << 25  # of the vocabulary, over all rows counted at once
_POSITIONS = 4096  # of a context, counted at once: contexts may be long, scratch memory is not


def apply_penalties(logits_RV: Tensor, penalties: Penalties) -> None:
    """Changes the named rows in place: repetition first, then presence and frequency."""
    together = max(1, _ENTRIES // max(1, logits_RV.shape[1]))
    for start in range(0, len(penalties.rows), together):
        _penalise(logits_RV, penalties, slice(start, start + together))


def apply_bias(logits_RV: Tensor, bias: LogitBias) -> None:
    """Adds to single logits in place; several biases of one token add up."""
    logits_RV.index_put_((bias.row, bias.token), bias.value, accumulate=True)


def _penalise(logits_RV: Tensor, penalties: Penalties, part: slice) -> None:
    rows = penalties.rows[part]
    row = logits_RV.index_select(0, rows)
    in_prompt, in_output = _counts(penalties.contexts, part, logits_RV.shape[1])
    repetition = penalties.repetition[part].unsqueeze(-1)
    repeated = torch.where(row > 0, row / repetition, row * repetition)
    row = torch.where(in_prompt + in_output > 0, repeated, row)
    row -= penalties.presence[part].unsqueeze(-1) * (in_output > 0)
    row -= penalties.frequency[part].unsqueeze(-1) * in_output
    logits_RV.index_copy_(0, rows, row)


def _counts(contexts: Contexts, part: slice, vocabulary: int) -> tuple[Tensor, Tensor]:
    """How often each entry stands in the prompts of the part's sequences, and behind them: int32 `[r, V]` each."""
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
