"""Sample by inversion: find the entry at which the cumulative sum of weights exceeds a uniform number."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_CHUNK = 128  # entries whose weights are summed before the search
_TINY, _HUGE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def safe_temperature(temperature_R: Tensor) -> Tensor:
    """Return the divisor of the logits: the temperature, or 1 for greedy rows.

    The divisor is clamped to finite normal float32 numbers, because a device may flush denormal numbers to 0.
    """
    return torch.where(temperature_R > 0, temperature_R, 1.0).clamp(_TINY, _HUGE)


def invert_cdf(weight_RV: Tensor, u_R: Tensor) -> Tensor:
    """Return the first entry at which the running sum of the weights exceeds `u` × their total: int64 `[R]`.

    `weight_RV` is float32 and not negative; `u_R` is float64 in [0, 1). An entry of weight 0 is returned only if all
    weights are 0; the last entry is returned then. Sums are float64, first over chunks, then within the chunk found.
    """
    chunks, mass = _chunked(weight_RV)
    running = mass.cumsum(-1)
    return _entry(weight_RV, chunks, mass, running, u_R * running[:, -1])


def first_passing(weight_RV: Tensor, target_R: Tensor) -> Tensor:
    """Return the first entry at which the running sum of the weights exceeds a float64 target: int64 `[R]`.

    Unlike in `invert_cdf`, the target may be above the total; the last entry with any weight is returned then.
    """
    chunks, mass = _chunked(weight_RV)
    return _entry(weight_RV, chunks, mass, mass.cumsum(-1), target_R)


def first_above(weight: Tensor, running: Tensor, target: Tensor) -> Tensor:
    """Return the index of the first `running` sum of the weights above the target, along the last axis: int64.

    A parallel scan may round the running sum at an entry of weight 0 above its predecessor's; such an entry is never
    returned. If rounding leaves no running sum above the target, the last entry with any weight is returned.
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
