"""Merge attention results over disjoint sets of keys: a mean weighted by their log-sum-exps."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two partial attention results: float outputs `[..., D]` and natural log-sum-exps `[...]` of their scores.

    A log-sum-exp of −inf marks a partial result without keys; its output is ignored, whatever it holds. Two such
    results give zeros and −inf; a NaN log-sum-exp gives NaN. Commutative, and associative up to rounding (Milakov &
    Gimelshein 2018; Juravsky et al. 2024).
    """
    peak = torch.maximum(lse_a, lse_b)
    peak = torch.where(peak == -torch.inf, 0.0, peak)
    weight_a, weight_b = torch.exp(lse_a - peak), torch.exp(lse_b - peak)
    total = weight_a + weight_b
    divisor = torch.where(total == 0, 1.0, total)
    share_a = (weight_a / divisor).unsqueeze(-1)
    share_b = (weight_b / divisor).unsqueeze(-1)
    out = _part(out_a, share_a) + _part(out_b, share_b)
    return out, peak + torch.log(total)


def _part(out: Tensor, share: Tensor) -> Tensor:
    # The output of a partial result without keys may be anything. A NaN log-sum-exp makes the merged result NaN.
    return torch.where(share == 0, 0.0, out * share)
