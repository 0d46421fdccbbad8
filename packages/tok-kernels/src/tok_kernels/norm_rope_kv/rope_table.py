"""Compute the cosines and sines of rotary embedding, as a table with one row per position.

Formulas are float32 and follow the order of transformers' `modeling_rope_utils`, so angles differ from those of
transformers by at most the last two bits. Axes: L positions, T tokens, D head size, F = D / 2 frequencies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import assert_never

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's scaling of RoPE to longer contexts (Llama team 2024, "The Llama 3 Herd of Models").

    Wavelengths above `original_max_positions / low_freq_factor` are stretched by `factor`. Wavelengths below
    `original_max_positions / high_freq_factor` are kept. Wavelengths between the two are interpolated. Raises
    ValueError if a value is not positive, or if `high_freq_factor` is not above `low_freq_factor`.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def __post_init__(self) -> None:
        _check_positive(self, "factor", "low_freq_factor", "high_freq_factor", "original_max_positions")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor is {self.high_freq_factor!r}; "
                f"it must be above low_freq_factor ({self.low_freq_factor!r})"
            )


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Position interpolation (Chen et al. 2023): every wavelength is stretched by `factor`."""

    factor: float

    def __post_init__(self) -> None:
        _check_positive(self, "factor")


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al. 2023): long wavelengths are stretched by `factor`, short ones are kept.

    A frequency that rotates more than `beta_fast` times within `original_max_positions` is kept. A frequency that
    rotates less than `beta_slow` times is stretched. Frequencies between the two are interpolated. `truncate` rounds
    the two limits outwards to whole indices of frequencies. Cosines and sines are multiplied by `attention_factor`.
    """

    factor: float
    original_max_positions: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        _check_positive(self, "factor", "original_max_positions", "attention_factor", "beta_fast", "beta_slow")


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """Dynamic NTK scaling (bloc97, emozilla 2023): beyond `max_positions` the base grows with the sequence's length.

    Keys in the cache are never rotated again, so each token keeps the base of the forward pass that computed it. In
    `rope_table`, the row of position p ≥ `max_positions` has the base of a sequence of p + 1 tokens.
    """

    factor: float
    max_positions: int

    def __post_init__(self) -> None:
        _check_positive(self, "factor", "max_positions")


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """LongRoPE (Ding et al. 2024): one stretching factor for each of the D / 2 frequencies.

    `short_factors` apply in forward passes of up to `original_max_positions` tokens, `long_factors` in longer ones.
    Cosines and sines are multiplied by `attention_factor`. Keys in the cache are never rotated again, as with
    `DynamicScaling`.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_positions: int
    attention_factor: float

    def __post_init__(self) -> None:
        _check_positive(self, "original_max_positions", "attention_factor")
        for name in ("short_factors", "long_factors"):
            if not all(value > 0 and math.isfinite(value) for value in getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)!r}; all must be positive numbers")


RopeScaling = Llama3Scaling | LinearScaling | YarnScaling | DynamicScaling | LongRopeScaling | None


def rope_table(head_dim: int, max_positions: int, base: float, scaling: RopeScaling = None) -> Tensor:
    """Return cosines (first half of the last axis) and sines (second half) of every position.

    The result is float32 `[L, D]` on the CPU. `L` is `max_positions`, and `D` is `head_dim` (even). Frequency `i` is
    `base ** (-2i / D)` radians per position (Su et al. 2021), unless `scaling` changes it. If frequencies depend on the
    length of the forward pass, row p is that of a pass that ends at position p. Raises ValueError that names the bad
    argument.
    """
    if max_positions <= 0:
        raise ValueError(f"max_positions is {max_positions!r}; it must be at least 1")
    position_L = torch.arange(max_positions, dtype=torch.int64, device="cpu")
    return rope_rows(head_dim, base, scaling, position_L, position_L + 1)


def rope_rows(head_dim: int, base: float, scaling: RopeScaling, position_T: Tensor, length_T: Tensor) -> Tensor:
    """Return cosines and sines of tokens at `position_T`, laid out as in `rope_table`.

    The result is float32 `[T, D]` on the device of `position_T`. `length_T` is the sequence's length in the forward
    pass that computes the token. Both are int64. Raises ValueError that names the bad argument.
    """
    if head_dim <= 0 or head_dim % 2:
        raise ValueError(f"head_dim is {head_dim!r}; it must be positive and even")
    if not (base > 0 and math.isfinite(base)):
        raise ValueError(f"base is {base!r}; it must be a positive number")
    for name in ("short_factors", "long_factors") if isinstance(scaling, LongRopeScaling) else ():
        if len(getattr(scaling, name)) != head_dim // 2:
            raise ValueError(f"{name} has {len(getattr(scaling, name))} entries; it must have {head_dim // 2}")
    if isinstance(scaling, DynamicScaling) and head_dim < 4:
        raise ValueError(f"head_dim is {head_dim!r}; dynamic scaling needs at least 4")
    exponent_F = torch.arange(0, head_dim, 2, dtype=torch.float32, device=position_T.device) / head_dim
    frequency = _frequencies(exponent_F, head_dim, base, scaling, length_T)
    angle_TF = position_T.float().unsqueeze(1) * frequency
    scale = scaling.attention_factor if isinstance(scaling, YarnScaling | LongRopeScaling) else 1.0
    return torch.cat((angle_TF.cos() * scale, angle_TF.sin() * scale), dim=-1)


def _frequencies(exponent_F: Tensor, head_dim: int, base: float, scaling: RopeScaling, length_T: Tensor) -> Tensor:
    """Return the frequencies in radians per position: `[F]`, or `[T, F]` if they depend on `length_T`."""
    if isinstance(scaling, DynamicScaling):
        # In float32, the last bits of torch's powers on a CPU depend on the number of rows.
        growth_T = scaling.factor * length_T.clamp(min=scaling.max_positions).double() / scaling.max_positions
        base_T = base * (growth_T - (scaling.factor - 1)) ** (head_dim / (head_dim - 2))
        grown_TF = (1.0 / base_T.unsqueeze(1) ** exponent_F).float()
        return torch.where((length_T > scaling.max_positions).unsqueeze(1), grown_TF, 1.0 / base**exponent_F)
    if isinstance(scaling, LongRopeScaling):
        short_F, long_F = (
            1.0 / (factors_F * base**exponent_F) for factors_F in _longrope_factors(scaling, exponent_F.device)
        )
        return torch.where((length_T > scaling.original_max_positions).unsqueeze(1), long_F, short_F)
    frequency_F = 1.0 / (base**exponent_F)
    if isinstance(scaling, LinearScaling):
        return frequency_F / scaling.factor
    if isinstance(scaling, YarnScaling):
        return _yarn_frequencies(exponent_F, head_dim, base, scaling)
    if isinstance(scaling, Llama3Scaling):
        return _llama3_frequencies(frequency_F, scaling)
    if scaling is not None:
        assert_never(scaling)
    return frequency_F


@lru_cache(maxsize=8)
def _longrope_factors(scaling: LongRopeScaling, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return short and long factors on the device; cached, because each copy from the host synchronises the device."""
    short_F, long_F = (
        torch.tensor(factors, dtype=torch.float32, device=device)
        for factors in (scaling.short_factors, scaling.long_factors)
    )
    return short_F, long_F


def _llama3_frequencies(frequency_F: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Interpolate between frequency and frequency / factor by the rotations within the original context."""
    wavelength_F = 2 * math.pi / frequency_F
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept_F = ((scaling.original_max_positions / wavelength_F - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - kept_F) * frequency_F / scaling.factor + kept_F * frequency_F


def _yarn_frequencies(exponent_F: Tensor, head_dim: int, base: float, scaling: YarnScaling) -> Tensor:
    """Interpolate between frequency and frequency / factor by the index of the frequency."""

    def index_of(rotations: float) -> float:
        """Return the (fractional) index of the frequency that rotates so often within the original context."""
        return head_dim * math.log(scaling.original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(base))

    first, last = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # as in transformers: the interpolation becomes a step
    index_F = torch.arange(head_dim // 2, dtype=torch.float32, device=exponent_F.device)
    stretched_F = ((index_F - first) / (last - first)).clamp(0, 1)
    kept_F = 1 - stretched_F
    inv_frequency_F = base**exponent_F
    return 1.0 / (scaling.factor * inv_frequency_F) * (1 - kept_F) + 1.0 / inv_frequency_F * kept_F


def _check_positive(scaling: object, *names: str) -> None:
    """Raise ValueError if a named field of `scaling` is not a positive finite number."""
    for name in names:
        value = getattr(scaling, name)
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} is {value!r}; it must be a positive number")
