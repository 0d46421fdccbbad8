"""With a backlog and lengths unknown in advance, memory is nearly full and little is computed twice."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from support.backlog import Lengths, bimodal, fill, geometric, log_normal
from support.schedules import engine_info
from tok_core.manager.forecast import admissible
from tok_core.manager.pace import FULL, KEPT, STREAM, Pace
from tok_core.manager.slow_start import VOUCHED, SlowStart
from tok_core.messages import Int64

INFO = engine_info(
    page_size=16, num_pages=4096, max_running=2048, max_step_tokens=8192, max_model_len=2048, vocab_size=1000
)


@pytest.mark.parametrize(
    ("lengths", "samples", "pages"), [(geometric, 3500, 0.96), (log_normal, 3500, 0.96), (bimodal, 6000, 0.93)]
)
def test_memory_is_nearly_full_and_little_is_computed_twice(lengths: Lengths, samples: int, pages: float) -> None:
    filled = fill(INFO, lengths(np.random.default_rng(1), samples).reshape(-1, 1), prompt=100, max_tokens=1024)
    assert filled.pages_settled >= pages
    assert filled.pages >= 0.8
    assert filled.recomputed <= 0.02


@pytest.mark.parametrize("lengths", [geometric, bimodal])
def test_many_samples_that_start_before_anything_is_known_do_not_overrun_memory(lengths: Lengths) -> None:
    samples = lengths(np.random.default_rng(1), 8 * 512).reshape(8, 512)
    info = engine_info(
        page_size=16, num_pages=10_000, max_running=4096, max_step_tokens=8192, max_model_len=2048, vocab_size=1000
    )
    filled = fill(info, samples, prompt=704, max_tokens=1024)
    assert filled.preempted <= 0.1
    assert filled.recomputed <= 0.02


@pytest.mark.parametrize(("lengths", "pages"), [(geometric, 0.95), (log_normal, 0.94), (bimodal, 0.91)])
def test_a_small_memory_is_nearly_full_too(lengths: Lengths, pages: float) -> None:
    info = msgspec.structs.replace(INFO, num_pages=1024)
    filled = fill(info, lengths(np.random.default_rng(1), 1500).reshape(-1, 1), prompt=100, max_tokens=1024)
    assert filled.pages_settled >= pages
    assert filled.pages >= 0.88
    assert filled.recomputed <= 0.02


def drawn(length: int, remaining: Int64) -> Pace:
    """The pace of samples of a prompt of so many tokens."""
    pace, same = Pace(), np.ones(len(remaining), np.int64)
    assert pace.outdated(0)
    pace.draw(0, length * same, remaining, 0 * same, 16)
    return pace


def test_a_stream_comes_to_hold_its_share_of_memory_as_soon_as_the_first_of_it_has_ended() -> None:
    reserve = drawn(1600, np.full(5, 300)).reserve(1000, np.arange(0, 601))
    assert reserve[0] == 0
    assert (np.diff(reserve) >= 0).all()
    assert reserve[150] == pytest.approx(STREAM * 500, rel=0.1)  # they hardly grow
    assert (reserve[300:] == int(STREAM * 1000)).all()


def test_samples_that_would_all_end_together_start_one_after_the_other() -> None:
    """None of 300 tokens each may be started that would leave the stream too little when they are at their largest."""
    pace, none, many = drawn(160, np.full(5, 300)), np.empty(0, np.int64), np.ones(100, np.int64)
    columns = none, none, none, 160 * many, 300 * many, 0 * many
    assert admissible(*columns, 1000, 16) == 34
    assert admissible(*columns, 1000, 16, lambda moments: pace.reserve(1000, moments)) == 3


def test_a_curve_is_drawn_anew_after_some_steps() -> None:
    pace = drawn(10, np.array([1]))
    assert not pace.outdated(KEPT - 1)
    assert pace.outdated(KEPT)


def test_the_pace_binds_from_when_memory_is_full_until_no_sample_waits() -> None:
    pace = Pace()
    for used, waits, binds in ((0.5, True, False), (FULL, True, True), (0.5, True, True), (1.0, False, False)):
        pace.observe(int(used * 1000), 1000, waits=waits)
        assert pace.binds is binds


def test_few_start_until_as_many_have_finished_as_run_unless_they_fit_for_sure() -> None:
    slow = SlowStart()
    assert slow.binds(finished=0, running=0)
    assert slow.allow(fitting=500, sure=40) == 40
    assert slow.binds(finished=10, running=30)
    assert slow.allow(fitting=500, sure=0) == 10 * VOUCHED
    assert slow.binds(finished=10, running=90)
    assert slow.allow(fitting=500, sure=3) == 3
    assert not slow.binds(finished=91, running=90)


@pytest.mark.parametrize(("pages", "prompt", "length"), [(100, 8, 320), (100, 16, 160), (200, 600, 100)])
def test_memory_for_a_few_samples_is_used_by_as_many_at_a_time(pages: int, prompt: int, length: int) -> None:
    info = msgspec.structs.replace(INFO, num_pages=pages)
    requests = 24
    filled = fill(info, np.full((requests, 1), length), prompt=prompt, max_tokens=length)
    at_once = pages // -(-(prompt + length) // info.page_size)
    assert filled.steps <= 1.6 * length * requests / at_once
