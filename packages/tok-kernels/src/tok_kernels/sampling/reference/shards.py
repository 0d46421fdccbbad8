"""Sample from a vocabulary sharded over ranks: the sums of all ranks decide which rank owns a row's token.

Every rank sends four float32 sums per row to the other ranks:
  peak       its largest logit
  total      sum of exponentials at temperature 1, relative to the peak
  mass_high  sum of exponentials at the row's own temperature, relative to the peak, rounded to float32
  mass_low   the rest of that sum, so that both together are as precise as without shards

From the sums, all ranks compute the owner of the row's token, which is the rank whose shard holds it. The owner finds
the token in its shard and sends it to the other ranks. Axes: S ranks, R rows, V entries of this rank's shard.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tok_kernels.batch import Sampled, SamplingBatch, Shards
from tok_kernels.sampling.reference.inversion import invert_cdf_at, safe_temperature, search_cdf
from tok_kernels.sampling.reference.philox import uniform
from tok_kernels.sampling.top_logprobs import no_top_logprobs


def sample_shards(logits_RV: Tensor, batch: SamplingBatch, shards: Shards) -> Sampled:
    """Compute `Backend.sample` from this rank's shard of the logits.

    All ranks get the same tokens. These equal the tokens without shards, except where rounding decides.
    """
    raw = logits_RV.float()
    peak, entry = raw.max(dim=-1)
    shifted = raw - _finite_peak(peak).unsqueeze(-1)
    total = shifted.exp().sum(-1, dtype=torch.float64)
    weight = shifted.div_(safe_temperature(batch.temperature).unsqueeze(-1)).exp_()
    mass = weight.sum(-1, dtype=torch.float64)
    rank_sums = torch.stack((peak, total.float(), mass.float(), (mass - mass.float()).float()))
    rank_sums_S4R = shards.gather(rank_sums)
    owner, target = _choose_owner(rank_sums_S4R, batch, shards.rank)
    sampled = entry
    if not batch.all_greedy:
        sampled = torch.where(batch.temperature > 0, invert_cdf_at(weight, target), entry)
    temperature = safe_temperature(batch.temperature) if batch.processed else torch.ones_like(batch.temperature)
    row_peak, log_total = _log_normaliser(rank_sums_S4R, temperature, batch.processed)
    logprob = (raw.gather(-1, sampled.unsqueeze(-1)).squeeze(-1) - row_peak) / temperature - log_total
    # The other ranks hold zeros, so the sums are exact; float32 holds token ids exactly.
    results = torch.stack(((sampled + shards.first).float(), logprob)).masked_fill(owner != shards.rank, 0.0)
    token, logprob = shards.gather(results).sum(0)
    return Sampled(token.long(), logprob, *no_top_logprobs(len(raw), raw.device))


def _choose_owner(rank_sums_S4R: Tensor, batch: SamplingBatch, rank: int) -> tuple[Tensor, Tensor]:
    """Return the owner of each row's token, and the running sum in the shard of `rank` that the token must exceed.

    The second result, float64 and relative to the shard's peak, is valid for rows that `rank` owns.
    """
    peak_RS = rank_sums_S4R[:, 0].T
    row_peak_R1 = peak_RS.max(-1, keepdim=True).values
    greedy = (peak_RS == row_peak_R1).to(torch.uint8).argmax(-1)
    if batch.all_greedy:
        return greedy, torch.zeros_like(batch.temperature, dtype=torch.float64)
    safe_temperature_R1 = safe_temperature(batch.temperature).double().unsqueeze(-1)
    rescale_RS = ((peak_RS.double() - _finite_peak(row_peak_R1)) / safe_temperature_R1).exp()
    mass_RS = rescale_RS * (rank_sums_S4R[:, 2].double() + rank_sums_S4R[:, 3].double()).T
    running_RS = mass_RS.cumsum(-1)
    target = uniform(batch.seed, batch.sample, batch.position) * running_RS[:, -1]
    owner = torch.where(batch.temperature > 0, search_cdf(mass_RS, running_RS, target), greedy)
    return owner, (target - (running_RS - mass_RS)[:, rank]) / rescale_RS[:, rank]


def _log_normaliser(rank_sums_S4R: Tensor, temperature_R: Tensor, processed: bool) -> tuple[Tensor, Tensor]:
    """Return each row's peak over all ranks, and the logarithm of its sum of exponentials relative to the peak.

    Exponentials are taken at the row's own temperature if `processed`, else at temperature 1. If all logits of a row
    are −inf, the peak is 0.
    """
    peak_SR, total_SR = rank_sums_S4R[:, 0].double(), rank_sums_S4R[:, 1].double()
    if processed:
        total_SR = rank_sums_S4R[:, 2].double() + rank_sums_S4R[:, 3].double()
    row_peak = _finite_peak(peak_SR.max(0).values)
    total = (total_SR * ((peak_SR - row_peak) / temperature_R).exp()).sum(0)
    return row_peak.float(), torch.where(total == 0, 1.0, total).log().float()


def _finite_peak(peak: Tensor) -> Tensor:
    """Replace peaks of −inf by 0, because −inf − (−inf) is NaN."""
    return torch.where(peak == -torch.inf, 0.0, peak)
