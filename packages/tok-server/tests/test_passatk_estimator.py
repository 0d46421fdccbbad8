"""The pass@k estimator against all subsets, and its confidence intervals."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tok_server.passatk.estimator import coverage, estimate_pass_at_k


def share_of_subsets_with_a_right_one(samples: int, right: int, k: int) -> Fraction:
    subsets = list(combinations(range(samples), k))
    return Fraction(sum(any(one < right for one in subset) for subset in subsets), len(subsets))


@given(st.data())
def test_pass_at_k_equals_the_share_of_k_subsets_with_a_right_sample(data: st.DataObject) -> None:
    samples = data.draw(st.integers(1, 9))
    right, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    found = estimate_pass_at_k([samples], [right], k)
    assert found == pytest.approx([float(share_of_subsets_with_a_right_one(samples, right, k))], abs=1e-12)


def test_pass_at_k_allows_different_sample_counts_per_problem() -> None:
    found = estimate_pass_at_k([4, 6, 9], [1, 2, 0], 3)
    assert found == pytest.approx(
        [float(share_of_subsets_with_a_right_one(*one, 3)) for one in ((4, 1), (6, 2), (9, 0))]
    )


def test_pass_at_k_of_large_counts_stays_in_the_unit_interval() -> None:
    found = estimate_pass_at_k([100_000] * 3, [0, 1, 99_999], 5_000)
    assert found == pytest.approx([0.0, 0.05, 1.0], abs=1e-9)
    assert ((found >= 0) & (found <= 1)).all()


@pytest.mark.parametrize(
    ("samples", "right", "k", "message"),
    [(5, 2, 0, "k is 0"), (5, 2, 6, "k is 6"), (5, 6, 2, "right"), (5, -1, 2, "right")],
)
def test_pass_at_k_refuses_impossible_counts(samples: int, right: int, k: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimate_pass_at_k([samples], [right], k)


def test_coverage_is_the_mean_and_its_interval_repeats_for_a_seed() -> None:
    right = np.random.default_rng(1).integers(0, 21, 60)
    one = coverage(np.full(60, 20), right, 5, seed=3)
    assert one == coverage(np.full(60, 20), right, 5, seed=3)
    assert one != coverage(np.full(60, 20), right, 5, seed=4)
    assert one.mean == pytest.approx(estimate_pass_at_k(np.full(60, 20), right, 5).mean())
    assert one.low < one.mean < one.high


def test_confidence_interval_covers_the_true_rate_95_percent_of_the_time() -> None:
    draws, rate, held = np.random.default_rng(0), 0.4, 0
    for seed in range(200):
        row = coverage(np.ones(80, int), draws.random(80) < rate, 1, resamples=400, seed=seed)
        held += row.low <= rate <= row.high
    assert 180 <= held <= 198  # 95 % of 200 is 190


def test_coverage_refuses_no_problems_and_invalid_confidence() -> None:
    with pytest.raises(ValueError, match="no problems"):
        coverage([], [], 1)
    with pytest.raises(ValueError, match="confidence is 95"):
        coverage([3], [1], 1, confidence=95)
