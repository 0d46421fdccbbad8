"""With a backlog and lengths unknown in advance, memory is nearly full and little is computed twice."""

from __future__ import annotations

import numpy as np
import pytest

from support.backlog import Lengths, bimodal, fill, geometric, log_normal
from support.schedules import engine_info
from tok_core.manager.pace import FULL, Pace
from tok_core.manager.slow_start import VOUCHED, SlowStart

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


def test_the_pace_binds_once_memory_has_been_full_and_samples_still_wait() -> None:
    pace, cost = Pace(), np.full(100, 500.0)
    assert pace.allow(50, cost, capacity=1000, used=0, step=1) == 50
    assert pace.allow(50, cost, capacity=1000, used=int(FULL * 1000), step=2) <= 3
    allowed = [pace.allow(50, cost, capacity=1000, used=1000, step=step) for step in range(3, 103)]
    assert sum(allowed) == pytest.approx(100 * 1000 / 500, abs=3)
    assert max(allowed) <= 3
    assert pace.allow(2, cost[:2], capacity=1000, used=1000, step=120) == 2
    assert pace.allow(50, cost, capacity=1000, used=0, step=121) == 50


def test_a_sample_that_costs_more_than_is_ever_saved_starts_nevertheless() -> None:
    pace, cost = Pace(), np.full(10, 1e6)
    starts = [pace.allow(1, cost, capacity=1000, used=950, step=step) for step in range(1, 3000)]
    assert 2 <= sum(starts) <= 4


def test_few_start_until_as_many_have_finished_as_run_unless_they_fit_for_sure() -> None:
    slow = SlowStart()
    assert slow.binds(finished=0, running=0)
    assert slow.allow(fitting=500, sure=40) == 40
    assert slow.binds(finished=10, running=30)
    assert slow.allow(fitting=500, sure=0) == 10 * VOUCHED
    assert slow.binds(finished=10, running=90)
    assert slow.allow(fitting=500, sure=3) == 3
    assert not slow.binds(finished=91, running=90)
