"""Filters keep a row's likeliest tokens. A token drawn from the whole row stays if it is kept, else another is drawn.

The outcome has the filtered distribution: of a kept set of probability Z, token t comes with p(t) from the first draw
and with (1 − Z) · p(t) / Z from the second, together p(t) / Z. Kernels gain by it: whether one token is kept is soon
known.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tok_kernels.batch import Filters
from tok_kernels.sampling.reference.inversion import invert_cdf

_ROWS = 256  # sorted at once, which bounds the memory


def redraw_filtered(
    token_R: Tensor, logits_RV: Tensor, weight_RV: Tensor, heat_R: Tensor, u_R: Tensor, filters: Filters
) -> Tensor:
    """The tokens, those that the filters of their rows remove drawn anew at `u` from what these keep.

    `weight` is proportional to the probabilities, `logits` divided by `heat` to their logarithms; both float32.
    """
    token_R = token_R.clone()
    for begin in range(0, len(filters.rows), _ROWS):
        part = slice(begin, begin + _ROWS)
        some = Filters(filters.rows[part], filters.top_k[part], filters.top_p[part], filters.min_p[part])
        keep = kept(logits_RV[some.rows], heat_R[some.rows], some)
        drawn = token_R[some.rows]
        again = invert_cdf(weight_RV[some.rows].masked_fill_(~keep, 0.0), u_R[some.rows])
        token_R[some.rows] = torch.where(keep.gather(-1, drawn.unsqueeze(-1)).squeeze(-1), drawn, again)
    return token_R


def kept(logits_rV: Tensor, heat_r: Tensor, filters: Filters) -> Tensor:
    """Which entries are left, bool `[r, V]`: of the rows that `filters.rows` names, float32, by logits / heat.

    Top-k removes what is below the k-th largest, so that ties with it stay; top-p keeps the smallest set of
    largest entries (lower ids first among equals) whose mass reaches `top_p`, at least one; min-p removes
    what is less likely than `min_p` times the most likely. Each works on what the one before it left.
    """
    ranked, token = logits_rV.sort(dim=-1, descending=True, stable=True)
    left = _top_k(ranked, filters.top_k)
    # The peak goes first, so that a tiny temperature divides 0 and negative numbers only.
    score = (ranked - ranked[:, :1]) / heat_r.unsqueeze(-1)
    left &= _top_p(score.masked_fill_(~left, -torch.inf), filters.top_p)
    left &= _min_p(ranked, heat_r, filters.min_p)
    return torch.zeros_like(left).scatter_(-1, token, left)


def _top_k(ranked_rV: Tensor, k_r: Tensor) -> Tensor:
    vocabulary = ranked_rV.shape[-1]
    k = torch.where(k_r > 0, k_r.clamp(max=vocabulary), vocabulary).long()
    return ranked_rV >= ranked_rV.gather(-1, (k - 1).unsqueeze(-1))


def _top_p(score_rV: Tensor, p_r: Tensor) -> Tensor:
    mass = score_rV.double().softmax(-1)
    before = mass.cumsum(-1) - mass
    p = p_r.unsqueeze(-1)
    left = (before < p) | (p >= 1)
    left[:, 0] = True
    return left


def _min_p(ranked_rV: Tensor, heat_r: Tensor, p_r: Tensor) -> Tensor:
    # A border on the logits themselves, that all backends find alike; log(0) = −inf removes nothing.
    border = ranked_rV[:, 0].double() + p_r.double().log() * heat_r.double()
    return ranked_rV >= border.float().unsqueeze(-1)
