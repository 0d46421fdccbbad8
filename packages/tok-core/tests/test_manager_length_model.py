"""Predicted lengths equal a plain Kaplan–Meier estimate, and follow finished and running samples."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tok_core.manager.admission import length_model as length_model_module
from tok_core.manager.admission.length_model import SCALE, SHAPE, LengthModel

LIMIT = 4000


def finish(
    model: LengthModel,
    lengths: np.ndarray,
    *,
    cut: np.ndarray | None = None,
    limit: int = LIMIT,
) -> None:
    """Report finished samples that the model has not followed before."""
    count = len(lengths)
    ended = np.ones(count, np.bool_) if cut is None else ~cut
    model.observe(np.zeros(count, np.int64), lengths, np.full(count, limit), ended)


def ask(model: LengthModel, generated: int, limit: int, share: float) -> int:
    """Return the further length that `share` of such samples stay below."""
    columns = np.array([generated]), np.array([limit])
    return int(model.remaining(*columns, np.array([share]))[0])


def mean(model: LengthModel, generated: int, limit: int) -> float:
    """Return the expected further length."""
    shares = (np.arange(1000) + 0.5) / 1000
    many = np.ones(1000, np.int64)
    return float(model.remaining(many * generated, many * limit, shares).mean())


def quantile_by_hand(finished: list[tuple[int, bool]], generated: int, limit: int, share: float) -> int:
    """Return the first length that, by Kaplan–Meier, less than 1 − share of samples at `generated` outlive."""
    outlives = 1.0
    for t in range(generated + 1, limit):
        at_risk = [length for length, _ in finished if length >= t]
        ends = [length for length, cut in finished if length == t and not cut]
        outlives *= 1 - len(ends) / len(at_risk) if at_risk else 1
        if outlives < 1 - share:
            return t - generated
    return limit - generated


@given(
    st.lists(st.tuples(st.integers(1, 12), st.booleans()), max_size=80),
    st.integers(0, 12),
    st.integers(1, 12),
    st.floats(0.01, 0.99),
)
def test_length_model_without_prior_equals_kaplan_meier(
    finished: list[tuple[int, bool]], generated: int, rest: int, share: float
) -> None:
    limit = min(13, generated + rest)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(length_model_module, "PRIOR_WEIGHT", 1e-9)
        patch.setattr(length_model_module, "SHAPE", 0.0)
        model = LengthModel()
        finish(model, np.array([n for n, _ in finished], np.int64), cut=np.array([c for _, c in finished], np.bool_))
        near = [quantile_by_hand(finished, generated, limit, share + by) for by in (-1e-3, 1e-3)]
        assert near[0] <= ask(model, generated, limit, share) <= near[1]


@given(
    st.lists(st.tuples(st.integers(0, 1 << 33), st.booleans()), max_size=30),
    st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 1 << 20), st.floats(0, 1, exclude_max=True))),
)
def test_predicted_length_is_between_one_token_and_the_remaining_limit(
    finished: list[tuple[int, bool]], asked: list[tuple[int, int, float]]
) -> None:
    model = LengthModel()
    finish(model, np.array([n for n, _ in finished], np.int64), cut=np.array([c for _, c in finished], np.bool_))
    generated, limit = np.array([one[:2] for one in asked], np.int64).reshape(-1, 2).T
    predicted = model.remaining(generated, limit, np.array([one[2] for one in asked]))
    assert predicted.dtype == np.int64
    left = np.maximum(limit - generated, 0)
    assert (predicted <= left).all()
    assert (predicted[left > 0] >= 1).all()


@pytest.mark.parametrize("generated", [0, 100, 2000])
def test_length_prior_grows_with_the_tokens_already_generated(generated: int) -> None:
    model = LengthModel()
    for share in (0.1, 0.5, 0.9):
        expected = (SCALE + generated) * ((1 - share) ** (-1 / SHAPE) - 1)
        assert ask(model, generated, 1 << 20, share) == pytest.approx(expected, rel=0.08, abs=1)


def test_running_samples_outweigh_the_length_prior() -> None:
    model = LengthModel()
    assert mean(model, 0, 100) < 80
    model.follow(np.zeros(5000, np.int64), np.full(5000, 100), np.full(5000, 100))
    assert mean(model, 0, 100) > 99


def test_length_model_treats_running_samples_as_censored() -> None:
    hasty, careful = LengthModel(), LengthModel()
    careful.follow(np.zeros(900, np.int64), np.full(900, 20), np.full(900, LIMIT))
    for model in (hasty, careful):
        finish(model, np.full(100, 10))
    assert ask(hasty, 0, LIMIT, 0.5) <= 10
    assert mean(careful, 0, LIMIT) > 150


def test_length_model_counts_a_repeatedly_followed_sample_once() -> None:
    once, often = LengthModel(), LengthModel()
    finish(once, np.full(300, 70))
    for seen in range(0, 70, 7):
        often.follow(np.full(300, seen), np.full(300, seen + 7), np.full(300, LIMIT))
    often.observe(np.full(300, 70), np.full(300, 70), np.full(300, LIMIT), np.ones(300, np.bool_))
    # Each finish fades earlier counts.
    assert mean(often, 0, LIMIT) == pytest.approx(mean(once, 0, LIMIT), rel=0.05)


@pytest.mark.parametrize("length", [10, 100, 1000, 30_000])
def test_length_of_equally_long_samples_is_predicted_within_a_bucket(length: int) -> None:
    model = LengthModel()
    finish(model, np.full(20_000, length), limit=2 * length)
    for generated in (0, length // 3, length * 2 // 3):
        assert mean(model, generated, 2 * length) == pytest.approx(length - generated, abs=1 + 0.08 * length)


def test_sample_that_outlived_short_ones_is_predicted_like_long_ones() -> None:
    model = LengthModel()
    finish(model, np.repeat([20, 500], 5000))
    assert mean(model, 0, LIMIT) == pytest.approx(260, rel=0.1)
    assert mean(model, 30, LIMIT) == pytest.approx(470, rel=0.1)


def test_predicted_length_quantiles_match_finished_samples() -> None:
    model, random = LengthModel(), np.random.default_rng(0)
    finish(model, random.geometric(1 / 128, 20_000))
    for share in (0.1, 0.5, 0.9):
        for generated in (0, 200):
            expected = -128 * np.log(1 - share)
            assert ask(model, generated, LIMIT, share) == pytest.approx(expected, rel=0.2, abs=3)


def test_samples_cut_off_at_max_tokens_do_not_count_as_finished() -> None:
    lengths, cut = np.repeat([10, 64], 1000), np.repeat([False, True], 1000)
    aware, unaware = LengthModel(), LengthModel()
    finish(aware, lengths, cut=cut, limit=64)
    finish(unaware, lengths, limit=64)
    assert mean(aware, 32, 128) >= 80
    assert mean(unaware, 32, 128) <= 40


def test_lengths_are_modelled_per_max_tokens_with_a_common_fallback() -> None:
    model = LengthModel()
    for _ in range(5):
        finish(model, np.full(500, 20), limit=100)
        finish(model, np.full(500, 700), limit=2000)
    assert mean(model, 0, 100) == pytest.approx(20, rel=0.15)
    assert mean(model, 0, 2000) == pytest.approx(700, rel=0.15)
    assert 200 < mean(model, 0, 5000) < 500


def test_recently_finished_lengths_weigh_more() -> None:
    shrinking, growing = LengthModel(), LengthModel()
    for _ in range(50):
        finish(shrinking, np.full(100, 1000))
        finish(growing, np.full(100, 50))
    for _ in range(50):
        finish(shrinking, np.full(100, 50))
        finish(growing, np.full(100, 1000))
    assert mean(shrinking, 0, LIMIT) < 300
    assert mean(growing, 0, LIMIT) > 750


def test_length_model_size_does_not_grow_with_observations() -> None:
    model, random = LengthModel(), np.random.default_rng(0)
    finish(model, random.integers(1, 1 << 20, 10))
    before = len(pickle.dumps(model)) + 16  # for the digits of a count
    for _ in range(100):
        finish(model, random.integers(1, 1 << 20, 10_000))
    assert len(pickle.dumps(model)) <= before
