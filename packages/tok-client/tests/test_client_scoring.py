"""Tests of pass@k and majority voting against brute-force counts."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tok_client import majority, pass_at_k
from tok_server.passatk.estimator import estimate_pass_at_k


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    draws = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)


@given(st.integers(1, 10_000), st.data())
def test_pass_at_k_of_many_samples_neither_overflows_nor_cancels(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    exact = 1 - Fraction(comb(n - c, k), comb(n, k))
    assert pass_at_k(n, c, k) == pytest.approx(float(exact), abs=1e-9)
    assert pass_at_k(n, c, k) == pytest.approx(float(estimate_pass_at_k([n], [c], k)[0]), abs=1e-9)


@pytest.mark.parametrize(
    ("n", "c", "k", "message"), [(4, 5, 1, "c is 5"), (4, -1, 1, "c is -1"), (4, 1, 0, "k is 0"), (4, 1, 5, "k is 5")]
)
def test_pass_at_k_refuses_invalid_counts_by_name(n: int, c: int, k: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pass_at_k(n, c, k)


def test_majority_is_the_most_frequent_answer_and_the_first_of_ties() -> None:
    assert majority(["a", "b", None, "b", None, None]) == "b"
    assert majority([3, 1, 1, 3]) == 3
    assert majority([None]) is None
    assert majority([]) is None
    assert majority(["", ""]) == ""
