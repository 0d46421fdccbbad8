"""The unbiased estimator of pass@k (Chen et al. 2021, "Evaluating Large Language Models Trained on Code").

Axes: P problems, R bootstrap resamples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Coverage:
    """Mean pass@k over problems, with a confidence interval."""

    k: int
    mean: float
    low: float
    high: float


def estimate_pass_at_k(samples_P: npt.ArrayLike, right_P: npt.ArrayLike, k: int) -> Float64:
    """Return 1 − C(n − c, k) / C(n, k) for each problem, of whose n samples c are right. Shape [P].

    It is computed as a product of k ratios in [0, 1], so that nothing overflows or cancels. Errors: ValueError unless 1
    ≤ k ≤ n and 0 ≤ c ≤ n.
    """
    samples, right = np.broadcast_arrays(np.asarray(samples_P, np.int64), np.asarray(right_P, np.int64))
    if k < 1 or (samples < k).any():
        min_samples = int(samples.min(initial=0))
        raise ValueError(f"k is {k}; allowed: 1 to the number of samples of every problem (fewest: {min_samples})")
    if ((right < 0) | (right > samples)).any():
        raise ValueError("right is out of range; allowed: 0 to the number of samples of the problem")
    drawn = np.arange(k)
    wrong_left = np.maximum(samples - right, 0)[..., None] - drawn
    ratios = np.maximum(wrong_left, 0) / (samples[..., None] - drawn)
    estimates: Float64 = 1.0 - np.prod(ratios, axis=-1)
    return estimates


def coverage(
    samples_P: npt.ArrayLike,
    right_P: npt.ArrayLike,
    k: int,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Coverage:
    """Return mean pass@k and the percentile interval of a bootstrap over problems; equal seeds give equal results.

    Errors: ValueError as `estimate_pass_at_k`, for no problems, and for a confidence not between 0 and 1.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; allowed: above 0, below 1")
    each_P = estimate_pass_at_k(samples_P, right_P, k)
    if each_P.size == 0:
        raise ValueError("no problems; allowed: at least one")
    picks_RP = np.random.default_rng(seed).integers(0, each_P.size, (resamples, each_P.size))
    means_R = each_P[picks_RP].mean(axis=1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(means_R, (tail, 1 - tail))
    return Coverage(k, float(each_P.mean()), float(low), float(high))
