"""Filter by top-k, top-p and min-p: keep a token sampled from the whole row if the filters keep it, else resample.

Checking whether the filters keep one token is cheaper than filtering before sampling. The distribution is the same. Let
Z be the probability of the tokens that the filters keep. A kept token t is sampled with these probabilities:
  at first       p(t)
  by resampling  (1 − Z) · p(t) / Z
  in total       p(t) / Z
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tok_kernels.batch import Filters, SamplingBatch
from tok_kernels.sampling.reference.inversion import invert_cdf, safe_temperature

_MAX_SORTED_ROWS = 256  # rows sorted at once; limits the memory


def resample_filtered(
    token_R: Tensor, logits_RV: Tensor, weight_RV: Tensor, safe_temperature_R: Tensor, u_R: Tensor, filters: Filters
) -> Tensor:
    """Return `token_R` with the tokens that filters remove resampled at the uniform numbers `u_R`.

    `weight_RV` is proportional to the probabilities. `logits_RV / safe_temperature_R` is their logarithm up to a
    constant. Both are float32.
    """
    token_R = token_R.clone()
    for chunk in _chunks(filters):
        rows = chunk.rows
        keep = kept_mask(logits_RV[rows], safe_temperature_R[rows], chunk)
        sampled = token_R[rows]
        resampled = invert_cdf(weight_RV[rows].masked_fill_(~keep, 0.0), u_R[rows])
        token_R[rows] = torch.where(keep.gather(-1, sampled.unsqueeze(-1)).squeeze(-1), sampled, resampled)
    return token_R


def processed_scores(edited_RV: Tensor, token_R: Tensor, batch: SamplingBatch) -> Tensor:
    """Return float32 logits after temperature and filters: −inf for tokens that filters remove.

    `edited_RV` are float32 logits after penalties and biases. The sampled tokens `token_R` are kept in any case,
    because another backend may have sampled them and may round differently at the threshold of a filter.
    """
    peak_R1 = edited_RV.amax(-1, keepdim=True)
    peak_R1 = torch.where(peak_R1 == -torch.inf, 0.0, peak_R1)
    score = (edited_RV - peak_R1).div_(safe_temperature(batch.temperature).unsqueeze(-1))
    if batch.filters is None or batch.all_greedy:
        return score
    for chunk in _chunks(batch.filters):
        rows, temperature = chunk.rows, batch.temperature[chunk.rows]
        keep = kept_mask(edited_RV[rows], safe_temperature(temperature), chunk) | (temperature == 0).unsqueeze(-1)
        keep.scatter_(-1, token_R[rows].unsqueeze(-1), True)
        score[rows] = score[rows].masked_fill_(~keep, -torch.inf)
    return score


def _chunks(filters: Filters) -> Iterator[Filters]:
    """Yield the filters of at most `_MAX_SORTED_ROWS` rows at a time."""
    for begin in range(0, len(filters.rows), _MAX_SORTED_ROWS):
        part = slice(begin, begin + _MAX_SORTED_ROWS)
        yield Filters(filters.rows[part], filters.top_k[part], filters.top_p[part], filters.min_p[part])


def kept_mask(logits_rV: Tensor, safe_temperature_r: Tensor, filters: Filters) -> Tensor:
    """Return which entries the filters keep, bool `[r, V]`, given the float32 logits of the rows `filters.rows`.

    Top-k removes entries below the k-th largest; ties with it stay. Of the entries left, top-p keeps the fewest largest
    entries (lower ids first among equals) whose probability reaches `top_p`, and at least one. Min-p removes entries
    that are less likely than `min_p` times the most likely entry. Probabilities are those of logits / temperature.
    """
    ranked, token = logits_rV.sort(dim=-1, descending=True, stable=True)
    kept = _top_k(ranked, filters.top_k)
    # Subtracting the peak before the division keeps a tiny temperature from producing +inf.
    score = (ranked - ranked[:, :1]) / safe_temperature_r.unsqueeze(-1)
    kept &= _top_p(score.masked_fill_(~kept, -torch.inf), filters.top_p)
    kept &= _min_p(ranked, safe_temperature_r, filters.min_p)
    return torch.zeros_like(kept).scatter_(-1, token, kept)


def _top_k(ranked_rV: Tensor, k_r: Tensor) -> Tensor:
    """Return which logits, in descending order, top-k keeps."""
    vocabulary = ranked_rV.shape[-1]
    k = torch.where(k_r > 0, k_r.clamp(max=vocabulary), vocabulary).long()
    return ranked_rV >= ranked_rV.gather(-1, (k - 1).unsqueeze(-1))


def _top_p(score_rV: Tensor, p_r: Tensor) -> Tensor:
    """Return which scores, in descending order, top-p keeps; −inf for entries that top-k removed."""
    mass = score_rV.double().softmax(-1)
    mass_before = mass.cumsum(-1) - mass
    p = p_r.unsqueeze(-1)
    kept = (mass_before < p) | (p >= 1)
    kept[:, 0] = True
    return kept


def _min_p(ranked_rV: Tensor, safe_temperature_r: Tensor, p_r: Tensor) -> Tensor:
    """Return which logits, in descending order, min-p keeps."""
    # All backends compute the threshold in this way. For min-p 0 it is log(0) = −inf, which keeps everything.
    threshold = ranked_rV[:, 0].double() + p_r.double().log() * safe_temperature_r.double()
    return ranked_rV >= threshold.float().unsqueeze(-1)
