"""Sample from a vocabulary sharded over ranks: the ranks' sums decide which rank has a row's token.

Every rank sends the other ranks four float32 numbers per row:
  peak   its largest logit
  total  the sum of exponentials at temperature 1, relative to the peak
  high   the sum of exponentials at the row's own temperature, relative to the peak, rounded to float32
  low    the remainder of that sum, so that both parts have the precision of an unsharded computation

From these numbers, all ranks know which rank has the row's token, its owner. The owner finds the token in its own shard
and sends it to the other ranks. Axes: S ranks, R rows, V entries of this rank's shard.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tok_kernels.batch import Sampled, SamplingBatch, Shards
from tok_kernels.sampling.reference.inversion import first_above, first_passing, safe_temperature
from tok_kernels.sampling.reference.philox import uniform
from tok_kernels.sampling.top_logprobs import no_top_logprobs


def sample_shards(logits_RV: Tensor, batch: SamplingBatch, shards: Shards) -> Sampled:
    """Compute `Backend.sample` from this rank's shard of the logits.

    All ranks get the same tokens. They equal the tokens of an unsharded vocabulary, except where rounding decides.
    """
    raw = logits_RV.float()
    peak, entry = raw.max(dim=-1)
    below = raw - _finite(peak).unsqueeze(-1)
    total = below.exp().sum(-1, dtype=torch.float64)
    weight = below.div_(safe_temperature(batch.temperature).unsqueeze(-1)).exp_()
    mass = weight.sum(-1, dtype=torch.float64)
    published = torch.stack((peak, total.float(), mass.float(), (mass - mass.float()).float()))
    published_S4R = shards.gather(published)
    owner, target = _owner(published_S4R, batch, shards.rank)
    sampled = entry
    if not batch.all_greedy:
        sampled = torch.where(batch.temperature > 0, first_passing(weight, target), entry)
    temperature = safe_temperature(batch.temperature) if batch.processed else torch.ones_like(batch.temperature)
    top, log_total = _normaliser(published_S4R, temperature, batch.processed)
    logprob = (raw.gather(-1, sampled.unsqueeze(-1)).squeeze(-1) - top) / temperature - log_total
    # Sums with zeros are exact, and so are token ids in float32.
    found = torch.stack(((sampled + shards.first).float(), logprob)).masked_fill(owner != shards.rank, 0.0)
    token, logprob = shards.gather(found).sum(0)
    return Sampled(token.long(), logprob, *no_top_logprobs(len(raw), raw.device))


def _owner(published_S4R: Tensor, batch: SamplingBatch, rank: int) -> tuple[Tensor, Tensor]:
    """Return each row's owner, and the running sum within the shard of `rank` that the token must exceed."""
    peak_RS = published_S4R[:, 0].T
    top_R1 = peak_RS.max(-1, keepdim=True).values
    greedy = (peak_RS == top_R1).to(torch.uint8).argmax(-1)
    if batch.all_greedy:
        return greedy, torch.zeros_like(batch.temperature, dtype=torch.float64)
    safe_temperature_R1 = safe_temperature(batch.temperature).double().unsqueeze(-1)
    share_RS = ((peak_RS.double() - _finite(top_R1)) / safe_temperature_R1).exp()
    mass_RS = share_RS * (published_S4R[:, 2].double() + published_S4R[:, 3].double()).T
    running_RS = mass_RS.cumsum(-1)
    target = uniform(batch.seed, batch.sample, batch.position) * running_RS[:, -1]
    owner = torch.where(batch.temperature > 0, first_above(mass_RS, running_RS, target), greedy)
    return owner, (target - (running_RS - mass_RS)[:, rank]) / share_RS[:, rank]


def _normaliser(published_S4R: Tensor, temperature_R: Tensor, processed: bool) -> tuple[Tensor, Tensor]:
    """Return each row's largest logit of all ranks, and the logarithm of the sum of exponentials relative to it.

    Exponentials are taken at the row's own temperature if `processed`, else at temperature 1. If all logits of a row
    are −inf, the first result is 0.
    """
    peak_SR, total_SR = published_S4R[:, 0].double(), published_S4R[:, 1].double()
    if processed:
        total_SR = published_S4R[:, 2].double() + published_S4R[:, 3].double()
    top = _finite(peak_SR.max(0).values)
    total = (total_SR * ((peak_SR - top) / temperature_R).exp()).sum(0)
    return top.float(), torch.where(total == 0, 1.0, total).log().float()


def _finite(peak: Tensor) -> Tensor:
    """Replace peaks of −inf by 0, so that −inf is never subtracted from −inf."""
    return torch.where(peak == -torch.inf, 0.0, peak)
