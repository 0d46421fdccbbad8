"""Drafts chosen by measured times, on a simulated GPU: a gain where tokens can be predicted, and no loss elsewhere."""

from __future__ import annotations

import pytest

from support.simulated_gpu import SimulatedDraft, run

MANY = 60_000  # tokens of a language that no index learns in a test


def weights_of_8b(rows: int) -> float:
    """Return the seconds of a step that reads 16 GB of weights."""
    return 4e-3 + 30e-6 * rows


def weights_of_1b(rows: int) -> float:
    """Return the seconds of a step that reads 2.5 GB of weights."""
    return 0.8e-3 + (8e-6 * rows if rows < 64 else 0.5e-3 + 2.3e-6 * (rows - 64))


def test_one_predictable_stream_is_much_faster() -> None:
    plain, drafted = (run(speculate, 1, 1, weights_of_8b, max_tokens=2048) for speculate in ("off", "auto"))
    assert drafted.seconds < plain.seconds / 1.8


def test_tail_of_predictable_samples_is_faster() -> None:
    plain, drafted = (run(one, 16, 64, weights_of_1b, max_tokens=1024, end=1 / 128) for one in ("off", "auto"))
    assert drafted.seconds < plain.seconds / 1.25
    assert drafted.tail_seconds < plain.tail_seconds / 1.5


def test_samples_without_predictable_tokens_lose_nothing() -> None:
    plain, drafted = (
        run(one, 16, 64, weights_of_1b, max_tokens=1024, end=1 / 128, probability=0.01) for one in ("off", "auto")
    )
    assert drafted.seconds < 1.01 * plain.seconds


@pytest.mark.parametrize("stages", [2, 4])
def test_one_predictable_stream_is_much_faster_in_a_pipeline(stages: int) -> None:
    plain, drafted = (run(one, 1, 1, weights_of_8b, max_tokens=2048, stages=stages) for one in ("off", "auto"))
    assert drafted.seconds < plain.seconds / 1.8


@pytest.mark.parametrize("stages", [2, 4])
def test_predictable_samples_keep_all_stages_of_a_pipeline_busy(stages: int) -> None:
    alone = run("auto", 16, 8, weights_of_8b, max_tokens=512)
    plain, drafted = (run(one, 16, 8, weights_of_8b, max_tokens=512, stages=stages) for one in ("off", "auto"))
    assert drafted.seconds < plain.seconds / 1.3
    assert drafted.seconds < alone.seconds / 1.4


@pytest.mark.parametrize("stages", [2, 4])
def test_pipeline_loses_nothing_where_nothing_can_be_predicted(stages: int) -> None:
    plain, drafted = (
        run(one, 16, 64, weights_of_1b, max_tokens=1024, end=1 / 128, probability=0.01, stages=stages)
        for one in ("off", "auto")
    )
    assert drafted.seconds < 1.01 * plain.seconds


def test_full_engine_does_not_wait_for_drafts() -> None:
    plain, drafted = (run(one, 4096, 1, lambda rows: 2.5e-6 * rows, max_tokens=30) for one in ("off", "auto"))
    assert drafted.seconds < 1.01 * plain.seconds


def test_slow_first_steps_of_a_size_do_not_end_drafting() -> None:
    """The first step of a size may load kernels and capture a graph."""
    plain, drafted = (run(one, 1, 1, weights_of_8b, max_tokens=2048, delay=1.0) for one in ("off", "auto"))
    draft_sizes = 5  # of up to 16 rows
    assert drafted.seconds < plain.seconds / 1.8 + draft_sizes


def test_captures_of_graphs_do_not_end_drafting() -> None:
    """A tail without drafts needs the graphs, too."""
    plain, drafted = (
        run(one, 16, 64, weights_of_1b, max_tokens=1024, end=1 / 128, capture=0.025) for one in ("off", "auto")
    )
    assert drafted.accepted > 20_000
    assert drafted.seconds < plain.seconds


@pytest.mark.parametrize(("accuracy", "least"), [(0.9, 1.8), (0.8, 1.4), (0.6, 1.1)])
def test_one_stream_is_faster_with_a_small_draft_model(accuracy: float, least: float) -> None:
    """The draft model takes a fifth of a step of the model; nothing else predicts the stream."""
    draft = SimulatedDraft(accuracy, pass_seconds=0.8e-3)
    plain, drafted = (
        run(one, 1, 1, weights_of_8b, max_tokens=2048, states=MANY, probability=0.01, draft=draft)
        for one in ("off", "auto")
    )
    assert drafted.seconds < plain.seconds / least


@pytest.mark.parametrize(("accuracy", "pass_seconds"), [(0.0, 0.8e-3), (0.3, 3e-3), (0.9, 20e-3)])
def test_draft_model_that_does_not_pay_costs_little(accuracy: float, pass_seconds: float) -> None:
    draft = SimulatedDraft(accuracy, pass_seconds)
    plain, drafted = (
        run(one, 4, 1, weights_of_8b, max_tokens=2048, states=MANY, probability=0.01, draft=draft)
        for one in ("off", "auto")
    )
    assert drafted.seconds < 1.02 * plain.seconds


def test_draft_model_at_the_border_of_paying_costs_little() -> None:
    """Drafts begin and end often, and each time the draft model reads what the sequences have grown by."""
    draft = SimulatedDraft(0.6, pass_seconds=0.8e-3)
    plain, drafted = (
        run(one, 64, 1, weights_of_8b, max_tokens=1024, states=MANY, probability=0.01, draft=draft)
        for one in ("off", "auto")
    )
    assert drafted.seconds < 1.02 * plain.seconds


def test_full_engine_does_not_wait_for_a_draft_model() -> None:
    draft = SimulatedDraft(0.5, pass_seconds=3e-3)
    plain, drafted = (
        run(one, 4096, 1, lambda rows: 2.5e-6 * rows, max_tokens=30, draft=draft) for one in ("off", "auto")
    )
    assert drafted.seconds < 1.01 * plain.seconds
