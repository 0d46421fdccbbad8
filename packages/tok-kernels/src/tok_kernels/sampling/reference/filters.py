"""Filter by top-k, top-p and min-p: keep a token sampled from the whole row if the filters keep it, else resample.

The result has the filtered distribution. Let Z be the probability of the tokens that the filters keep. A kept token t
is sampled with these probabilities:
  at first           p(t)
  by resampling      (1 − Z) · p(t) / Z
  in total           p(t) / Z
Kernels are faster this way, because checking whether one token is kept is cheap.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tok_kernels.batch import Filters, SamplingBatch
from tok_kernels.sampling.reference.inversion import invert_cdf, safe_temperature

_ROWS = 256  # rows sorted at once, which limits the memory


def resample_filtered(
    token_R: Tensor, logits_RV: Tensor, weight_RV: Tensor, safe_temperature_R: Tensor, u_R: Tensor, filters: Filters
) -> Tensor:
    """Return the tokens; tokens that their row's filters remove are resampled at `u_R`.

    `weight_RV` is proportional to the probabilities, and `logits_RV / safe_temperature_R` is their logarithm up to a
    constant; both are float32.
    """
    token_R = token_R.clone()
    for begin in range(0, len(filters.rows), _ROWS):
        part = slice(begin, begin + _ROWS)
        some = Filters(filters.rows[part], filters.top_k[part], filters.top_p[part], filters.min_p[part])
        keep = kept(logits_RV[some.rows], safe_temperature_R[some.rows], some)
        sampled = token_R[some.rows]
        again = invert_cdf(weight_RV[some.rows].masked_fill_(~keep, 0.0), u_R[some.rows])
        token_R[some.rows] = torch.where(keep.gather(-1, sampled.unsqueeze(-1)).squeeze(-1), sampled, again)
    return token_R


def processed_scores(edited_RV: Tensor, token_R: Tensor, batch: SamplingBatch) -> Tensor:
    """Return logits of the distribution that the tokens are sampled from: after temperature and filters, float32.

    `edited_RV` are float32 logits after penalties and biases. The sampled tokens `token_R` count as kept, because
    backends may round differently at the threshold of a filter.
    """
    peak_R1 = edited_RV.amax(-1, keepdim=True)
    peak_R1 = torch.where(peak_R1 == -torch.inf, 0.0, peak_R1)
    score = (edited_RV - peak_R1).div_(safe_temperature(batch.temperature).unsqueeze(-1))
    if batch.filters is None or batch.all_greedy:
        return score
    for begin in range(0, len(batch.filters.rows), _ROWS):
        part = slice(begin, begin + _ROWS)
        filters = batch.filters
        some = Filters(filters.rows[part], filters.top_k[part], filters.top_p[part], filters.min_p[part])
        temperature = batch.temperature[some.rows]
        keep = kept(edited_RV[some.rows], safe_temperature(temperature), some) | (temperature == 0).unsqueeze(-1)
        keep.scatter_(-1, token_R[some.rows].unsqueeze(-1), True)
        score[some.rows] = score[some.rows].masked_fill_(~keep, -torch.inf)
    return score


def kept(logits_rV: Tensor, safe_temperature_r: Tensor, filters: Filters) -> Tensor:
    """Return which entries the filters keep, bool `[r, V]`, given float32 logits of the rows `filters.rows`.

    Probabilities are those of logits / temperature. Top-k removes entries below the k-th largest, so that ties with it
    stay. Of the entries that top-k keeps, top-p keeps the smallest set of largest entries (lower ids first among
    equals) whose probability reaches `top_p`, at least one entry. Min-p removes entries that are less likely than
    `min_p` times the most likely entry.
    """
    ranked, token = logits_rV.sort(dim=-1, descending=True, stable=True)
    left = _top_k(ranked, filters.top_k)
    # The peak is subtracted first, so that a tiny temperature divides 0 and negative numbers only.
    score = (ranked - ranked[:, :1]) / safe_temperature_r.unsqueeze(-1)
    left &= _top_p(score.masked_fill_(~left, -torch.inf), filters.top_p)
    left &= _min_p(ranked, safe_temperature_r, filters.min_p)
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


def _min_p(ranked_rV: Tensor, safe_temperature_r: Tensor, p_r: Tensor) -> Tensor:
    # All backends compute this threshold of the logits alike; log(0) = −inf removes nothing.
    threshold = ranked_rV[:, 0].double() + p_r.double().log() * safe_temperature_r.double()
    return ranked_rV >= threshold.float().unsqueeze(-1)
