"""Sample by inverse transform: find the entry at which the running sum of weights exceeds a uniform number."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_CHUNK_ENTRIES = 128  # entries summed to one weight in the first stage of the search
_MIN_FLOAT32, _MAX_FLOAT32 = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def safe_temperature(temperature_R: Tensor) -> Tensor:
    """Return the divisor of the logits: the temperature, or 1 for greedy rows (temperature 0).

    The divisor is clamped to normal finite float32 numbers, because a device may flush subnormal numbers to 0.
    """
    return torch.where(temperature_R > 0, temperature_R, 1.0).clamp(_MIN_FLOAT32, _MAX_FLOAT32)


def invert_cdf(weight_RV: Tensor, u_R: Tensor) -> Tensor:
    """Return the first entry at which the running sum of the weights exceeds `u` times their total: int64 `[R]`.

    `weight_RV` is float32 and not negative; `u_R` is float64 in [0, 1). The result has a positive weight, unless all
    weights are 0: then it is the last entry. The search has two stages with float64 sums: over chunks, then within one.
    """
    chunks, chunk_mass = _sum_chunks(weight_RV)
    running = chunk_mass.cumsum(-1)
    return _search_chunks(weight_RV, chunks, chunk_mass, running, u_R * running[:, -1])


def invert_cdf_at(weight_RV: Tensor, target_R: Tensor) -> Tensor:
    """Return the first entry at which the running sum of the weights exceeds a float64 target: int64 `[R]`.

    If the target exceeds the total, the result is the last entry of positive weight.
    """
    chunks, chunk_mass = _sum_chunks(weight_RV)
    return _search_chunks(weight_RV, chunks, chunk_mass, chunk_mass.cumsum(-1), target_R)


def search_cdf(weight: Tensor, running: Tensor, target: Tensor) -> Tensor:
    """Return the first entry of positive weight whose running sum exceeds the target, along the last axis: int64.

    If rounding leaves no such entry, return the last entry of positive weight. Entries of weight 0 are skipped, because
    a parallel scan may round the running sum there above its predecessor's.
    """
    has_weight = weight > 0
    is_above = has_weight & (running > target.unsqueeze(-1))
    last = weight.shape[-1] - 1 - has_weight.flip(-1).to(torch.uint8).argmax(-1)
    return torch.where(is_above.any(-1), is_above.to(torch.uint8).argmax(-1), last)


def _sum_chunks(weight_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights in zero-padded chunks `[R, C, 128]`, and the float64 sum of each chunk `[R, C]`."""
    rows, vocabulary = weight_RV.shape
    padded = F.pad(weight_RV, (0, -vocabulary % _CHUNK_ENTRIES)) if vocabulary % _CHUNK_ENTRIES else weight_RV
    chunks = padded.view(rows, padded.shape[-1] // _CHUNK_ENTRIES, _CHUNK_ENTRIES)
    return chunks, chunks.sum(-1, dtype=torch.float64)


def _search_chunks(weight_RV: Tensor, chunks: Tensor, chunk_mass: Tensor, running: Tensor, target_R: Tensor) -> Tensor:
    """Find the chunk of the target by the running sums of chunks, and then the entry within it."""
    chunk = search_cdf(chunk_mass, running, target_R).unsqueeze(-1)
    mass_before = (running - chunk_mass).gather(-1, chunk)
    chunk_weight = chunks.gather(1, chunk.unsqueeze(-1).expand(-1, 1, _CHUNK_ENTRIES)).squeeze(1).double()
    entry = search_cdf(chunk_weight, chunk_weight.cumsum(-1), target_R - mass_before.squeeze(-1))
    return (chunk.squeeze(-1) * _CHUNK_ENTRIES + entry).clamp(max=weight_RV.shape[1] - 1)
