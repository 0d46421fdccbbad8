"""Inverts a cumulative distribution that is given by weights: which entry a number falls to."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_CHUNK = 128  # entries whose weights are summed before the search
_TINY, _HUGE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def heat(temperature_R: Tensor) -> Tensor:
    """What logits are divided by: the temperature, 1 for greedy rows. Denormal ones, which may flush to 0, and
    infinite ones are replaced by their neighbours."""
    return torch.where(temperature_R > 0, temperature_R, 1.0).clamp(_TINY, _HUGE)


def invert_cdf(weight_RV: Tensor, u_R: Tensor) -> Tensor:
    """The first entry at which the running sum of the weights exceeds `u` × their total: int64 `[R]`.

    `weight_RV` float32, not negative; `u_R` float64 in [0, 1). Never an entry of weight 0 unless all are 0
    (then the last entry). Sums are float64, over chunks first and then within the chunk found.
    """
    chunks, mass = _chunked(weight_RV)
    running = mass.cumsum(-1)
    return _entry(weight_RV, chunks, mass, running, u_R * running[:, -1])


def first_passing(weight_RV: Tensor, target_R: Tensor) -> Tensor:
    """As `invert_cdf`, where the running sum exceeds a float64 target that need not be below the total."""
    chunks, mass = _chunked(weight_RV)
    return _entry(weight_RV, chunks, mass, mass.cumsum(-1), target_R)


def first_above(weight: Tensor, running: Tensor, target: Tensor) -> Tensor:
    """Index along the last axis of the first `running` sum of the weights above the target: int64.

    A parallel scan may round an entry of weight 0 above its predecessor: it is not hit. Rounding may also leave no
    running sum above the target: then the last entry with any weight.
    """
    possible = weight > 0
    hit = possible & (running > target.unsqueeze(-1))
    last = weight.shape[-1] - 1 - possible.flip(-1).to(torch.uint8).argmax(-1)
    return torch.where(hit.any(-1), hit.to(torch.uint8).argmax(-1), last)


def _chunked(weight_RV: Tensor) -> tuple[Tensor, Tensor]:
    rows, vocabulary = weight_RV.shape
    padded = F.pad(weight_RV, (0, -vocabulary % _CHUNK)) if vocabulary % _CHUNK else weight_RV
    chunks = padded.view(rows, padded.shape[-1] // _CHUNK, _CHUNK)
    return chunks, chunks.sum(-1, dtype=torch.float64)


def _entry(weight_RV: Tensor, chunks: Tensor, mass: Tensor, running: Tensor, target_R: Tensor) -> Tensor:
    chunk = first_above(mass, running, target_R).unsqueeze(-1)
    before = (running - mass).gather(-1, chunk)
    inside = chunks.gather(1, chunk.unsqueeze(-1).expand(-1, 1, _CHUNK)).squeeze(1).double()
    entry = first_above(inside, inside.cumsum(-1), target_R - before.squeeze(-1))
    return (chunk.squeeze(-1) * _CHUNK + entry).clamp(max=weight_RV.shape[1] - 1)
