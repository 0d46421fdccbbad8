"""What a request does to its logits before the draw: penalties and biases."""

from __future__ import annotations

import torch
from torch import Tensor

from tok_kernels.batch import LogitBias, Penalties


def apply_penalties(logits_RV: Tensor, penalties: Penalties) -> None:
    """Changes the named rows in place: repetition first, then frequency and presence."""
    row = logits_RV.index_select(0, penalties.rows)
    generated = penalties.in_output > 0
    repetition = penalties.repetition.unsqueeze(-1)
    repeated = torch.where(row > 0, row / repetition, row * repetition)
    row = torch.where(penalties.in_prompt | generated, repeated, row)
    row -= penalties.frequency.unsqueeze(-1) * penalties.in_output
    row -= penalties.presence.unsqueeze(-1) * generated
    logits_RV.index_copy_(0, penalties.rows, row)


def apply_bias(logits_RV: Tensor, bias: LogitBias) -> None:
    """Adds to single logits in place; several biases of one token add up."""
    logits_RV.index_put_((bias.row, bias.token), bias.value, accumulate=True)
