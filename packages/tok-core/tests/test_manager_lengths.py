"""Predicted lengths against a plain Kaplan–Meier estimate, and how they follow what finishes."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tok_core.manager.lengths import PRIOR_WEIGHT, LengthModel


def one(model: LengthModel, generated: int, limit: int) -> int:
    return int(model.remaining(np.array([generated]), np.array([limit]))[0])


def expected_by_hand(finished: list[tuple[int, bool]], generated: int, limit: int) -> float:
    """Mean residual life up to the limit by Kaplan–Meier, drawn to half of the rest; length by length."""
    outlives = 1.0
    life = 0.0
    for t in range(generated, limit):
        at_risk = [length for length, _ in finished if length >= t]
        ends = [length for length, cut in finished if length == t and not cut]
        if t > generated and at_risk:
            outlives *= 1 - len(ends) / len(at_risk)
        life += outlives
    longer = sum(length > generated for length, _ in finished)
    prior = (limit - generated) / 2
    if not longer:
        return prior
    trust = longer / (longer + PRIOR_WEIGHT)
    return trust * life + (1 - trust) * prior


@given(
    st.lists(st.tuples(st.integers(1, 24), st.booleans()), max_size=80),
    st.integers(0, 24),
    st.integers(1, 24),
)
def test_short_samples_are_predicted_by_the_mean_residual_life(
    finished: list[tuple[int, bool]], generated: int, rest: int
) -> None:
    limit = min(25, generated + rest)
    model = LengthModel()
    model.observe(np.array([n for n, _ in finished], np.int64), np.array([c for _, c in finished], np.bool_))
    expected = expected_by_hand(finished, generated, limit)
    predicted = one(model, generated, limit)
    assert abs(predicted - min(max(expected, min(1, limit - generated)), limit - generated)) <= 0.5 + 1e-9


@given(
    st.lists(st.tuples(st.integers(0, 1 << 33), st.booleans()), max_size=30),
    st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 1 << 20)), max_size=30),
)
def test_a_prediction_is_at_least_one_token_and_at_most_what_the_limit_leaves(
    finished: list[tuple[int, bool]], asked: list[tuple[int, int]]
) -> None:
    model = LengthModel()
    model.observe(np.array([n for n, _ in finished], np.int64), np.array([c for _, c in finished], np.bool_))
    generated, limit = np.array(asked, np.int64).reshape(-1, 2).T
    predicted = model.remaining(generated, limit)
    assert predicted.dtype == np.int64
    left = np.maximum(limit - generated, 0)
    assert (predicted <= left).all()
    assert (predicted[left > 0] >= 1).all()


def test_before_anything_has_finished_half_of_what_the_limit_leaves_is_expected() -> None:
    model = LengthModel()
    assert model.remaining(np.array([0, 50, 100, 99]), np.array([100, 100, 100, 100])).tolist() == [
        50,
        25,
        0,
        1,
    ]


@pytest.mark.parametrize("length", [10, 100, 1000, 30_000])
def test_samples_of_one_length_are_predicted_within_a_bucket(length: int) -> None:
    model = LengthModel()
    model.observe(np.full(20_000, length))
    for generated in (0, length // 3, length * 2 // 3):
        assert one(model, generated, 2 * length) == pytest.approx(length - generated, abs=1 + 0.08 * length)


def test_a_sample_that_outlived_the_short_ones_is_expected_to_run_like_the_long_ones() -> None:
    model = LengthModel()
    model.observe(np.repeat([20, 500], 5000))
    assert one(model, 0, 4000) == pytest.approx(260, rel=0.08)
    assert one(model, 30, 4000) == pytest.approx(470, rel=0.08)


def test_samples_that_their_limit_cut_off_are_no_ends() -> None:
    lengths, cut = np.repeat([10, 64], 1000), np.repeat([False, True], 1000)
    aware, unaware = LengthModel(), LengthModel()
    aware.observe(lengths, cut)
    unaware.observe(lengths)
    assert one(aware, 32, 128) >= 90
    assert one(unaware, 32, 128) <= 40


def test_what_finished_lately_weighs_more() -> None:
    shrinking, growing = LengthModel(), LengthModel()
    for _ in range(50):
        shrinking.observe(np.full(100, 1000))
        growing.observe(np.full(100, 50))
    for _ in range(50):
        shrinking.observe(np.full(100, 50))
        growing.observe(np.full(100, 1000))
    assert one(shrinking, 0, 4000) < 250
    assert one(growing, 0, 4000) > 750


def test_the_model_does_not_grow_with_what_it_has_seen() -> None:
    model, random = LengthModel(), np.random.default_rng(0)
    model.observe(random.integers(1, 1 << 20, 10))
    before = len(pickle.dumps(model))
    for _ in range(100):
        model.observe(random.integers(1, 1 << 20, 10_000))
    assert len(pickle.dumps(model)) == before
