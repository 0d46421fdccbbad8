"""Rotary embedding angles are computed once, as a table of cosines and sines per position."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's stretching of RoPE to longer contexts (Llama team 2024, "The Llama 3 Herd of Models").

    Wavelengths above `original_max_positions / low_freq_factor` are stretched by `factor`, those below
    `original_max_positions / high_freq_factor` are kept, and those between are interpolated.
    Raises ValueError for factors that are not positive or not in order.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_positions"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} is {value!r}; it must be a positive number")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor is {self.high_freq_factor!r}; "
                f"it must be above low_freq_factor ({self.low_freq_factor!r})"
            )


RopeScaling = Llama3Scaling | None


def rope_table(head_dim: int, max_positions: int, base: float, scaling: RopeScaling = None) -> Tensor:
    """Cosines (first half of the last axis) and sines (second half) of every position: float32 `[L, D]` on
    the CPU.

    `L` is `max_positions`, `D` is `head_dim` (even); column `i` turns by `base ** (-2i / D)` radians a
    position (Su et al. 2021). All steps are in float32, as the models were trained. Raises ValueError naming
    the bad argument.
    """
    if head_dim <= 0 or head_dim % 2:
        raise ValueError(f"head_dim is {head_dim!r}; it must be positive and even")
    if max_positions <= 0:
        raise ValueError(f"max_positions is {max_positions!r}; it must be at least 1")
    if not (base > 0 and math.isfinite(base)):
        raise ValueError(f"base is {base!r}; it must be a positive number")
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    frequency = 1.0 / (base**exponent)
    if scaling is not None:
        frequency = _stretch(frequency, scaling)
    position = torch.arange(max_positions, dtype=torch.float32, device="cpu")
    angle = torch.outer(position, frequency)
    return torch.cat((angle.cos(), angle.sin()), dim=-1)


def _stretch(frequency: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Each frequency becomes a blend of itself and itself / factor, by how many turns fit the original
    context."""
    wavelength = 2 * math.pi / frequency
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((scaling.original_max_positions / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - kept) * frequency / scaling.factor + kept * frequency
