"""What a request does to its logits before the draw: penalties, biases, and filters of unlikely tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from tok_kernels.batch import Filters, LogitBias, Penalties


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


def apply_filters(score_RV: Tensor, filters: Filters) -> None:
    """Sets removed entries of the named rows to −inf, in place; `score` is logits / temperature with row
    maximum 0.

    Top-k removes what is below the k-th largest, so that ties with it stay; top-p keeps the smallest set of
    largest entries (lower ids first among equals) whose mass reaches `top_p`, at least one; min-p removes
    what is less likely than `min_p` times the most likely. Each works on what the one before it left.
    """
    row = score_RV.index_select(0, filters.rows)
    ranked, token = row.sort(dim=-1, descending=True, stable=True)
    ranked = _top_k(ranked, filters.top_k)
    ranked = _top_p(ranked, filters.top_p)
    ranked = _min_p(ranked, filters.min_p)
    score_RV.index_copy_(0, filters.rows, row.scatter(-1, token, ranked))


def _top_k(ranked_rV: Tensor, k_r: Tensor) -> Tensor:
    vocabulary = ranked_rV.shape[-1]
    k = torch.where(k_r > 0, k_r.clamp(max=vocabulary), vocabulary).long()
    border = ranked_rV.gather(-1, (k - 1).unsqueeze(-1))
    return ranked_rV.masked_fill(ranked_rV < border, -torch.inf)


def _top_p(ranked_rV: Tensor, p_r: Tensor) -> Tensor:
    mass = ranked_rV.double().softmax(-1)
    before = mass.cumsum(-1) - mass
    p = p_r.unsqueeze(-1)
    removed = (before >= p) & (p < 1)
    removed[:, 0] = False
    return ranked_rV.masked_fill(removed, -torch.inf)


def _min_p(ranked_rV: Tensor, p_r: Tensor) -> Tensor:
    # The most likely entry has score 0, so a score is the logarithm of the ratio; log(0) = −inf removes
    # nothing.
    return ranked_rV.masked_fill(ranked_rV < p_r.log().unsqueeze(-1), -torch.inf)
