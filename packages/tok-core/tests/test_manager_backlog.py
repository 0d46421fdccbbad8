"""With a backlog of samples of unknown length, admission keeps the KV cache nearly full and recomputes little."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from support.backlog import Lengths, LengthWorker, bimodal, fill, geometric, log_normal
from support.schedules import engine_info, make_manager, submit
from tok_core import EngineConfig, SamplingParams
from tok_core.manager.admission.forecast import PageDemand, admissible
from tok_core.manager.admission.page_reserves import (
    CURVE_STEPS,
    FULL_SHARE,
    INITIAL_SEQUENCES,
    MAX_PAGE_SHARE,
    MAX_SEQUENCES,
    MIN_SEQUENCES,
    NEAR_STEPS,
    RECOMPUTED_SHARE,
    SEQUENCES_STEP,
    STREAM_SHARE,
    PageWatermark,
    StaggeredAdmission,
)
from tok_core.manager.loop import Manager
from tok_core.messages import Int64

INFO = engine_info(
    page_size=16, num_pages=4096, max_running=2048, max_step_tokens=8192, max_model_len=2048, vocab_size=1000
)


@pytest.mark.parametrize(("lengths", "samples", "settled"), [(geometric, 3500, 0.97), (log_normal, 3500, 0.97)])
def test_admission_fills_the_kv_cache_with_little_recomputation(lengths: Lengths, samples: int, settled: float) -> None:
    filled = fill(INFO, lengths(np.random.default_rng(1), samples).reshape(-1, 1), prompt=100, max_tokens=1024)
    assert filled.pages_settled >= settled
    assert filled.pages >= 0.93
    assert filled.recomputed <= 0.02


@pytest.mark.parametrize("lengths", [geometric, bimodal])
def test_many_samples_of_unknown_length_cause_little_recomputation(lengths: Lengths) -> None:
    samples = lengths(np.random.default_rng(1), 8 * 512).reshape(8, 512)
    info = engine_info(
        page_size=16, num_pages=10_000, max_running=4096, max_step_tokens=8192, max_model_len=2048, vocab_size=1000
    )
    filled = fill(info, samples, prompt=704, max_tokens=1024)
    assert filled.recomputed <= 0.01


def test_admission_nearly_fills_a_small_kv_cache() -> None:
    info = msgspec.structs.replace(INFO, num_pages=1024)
    filled = fill(info, bimodal(np.random.default_rng(1), 2000).reshape(-1, 1), prompt=100, max_tokens=1024)
    assert filled.pages_settled >= 0.93
    assert filled.pages >= 0.915
    assert filled.recomputed <= 0.02


def test_admission_fills_the_kv_cache_with_mixed_prompts_and_limits() -> None:
    random, requests = np.random.default_rng(3), 1500
    prompts = np.clip(random.lognormal(np.log(150), 0.9, requests), 4, 1000).astype(np.int64)
    lengths = np.clip(random.lognormal(np.log(130), 0.9, requests), 1, 500).astype(np.int64)
    info = msgspec.structs.replace(INFO, num_pages=2048)
    filled = fill(info, lengths.reshape(-1, 1), prompts, 2 * lengths)
    assert filled.pages >= 0.9
    assert filled.recomputed <= 0.02


def drawn(length: int, remaining: Int64) -> StaggeredAdmission:
    """Return a staggered admission with the curve of samples of a prompt of `length` tokens."""
    pace, same = StaggeredAdmission(), np.ones(len(remaining), np.int64)
    assert pace.outdated(0)
    pace.compute_curve(0, PageDemand(length * same, remaining, 0 * same), 16)
    return pace


def test_staggered_admission_reserves_its_share_by_the_first_finish() -> None:
    reserve = drawn(1600, np.full(5, 300)).reserve(1000, np.arange(0, 601))
    assert reserve[0] == 0
    assert (np.diff(reserve) >= 0).all()
    assert reserve[150] == pytest.approx(STREAM_SHARE * 500, rel=0.1)  # the samples hardly grow
    assert (reserve[300:] == int(STREAM_SHARE * 1000)).all()


def test_staggered_admission_spreads_starts_of_samples_of_equal_length() -> None:
    """Samples of 300 tokens each start only if they leave the stream its reserve when they are at their largest."""
    pace, none, many = drawn(160, np.full(5, 300)), np.empty(0, np.int64), np.ones(100, np.int64)
    demands = PageDemand(none, none, none), PageDemand(160 * many, 300 * many, 0 * many)
    assert admissible(*demands, 1000, 16) == 34
    assert admissible(*demands, 1000, 16, lambda moments: pace.reserve(1000, moments)) == 2


def test_staggered_admission_curve_is_outdated_after_curve_steps() -> None:
    pace = drawn(10, np.array([1]))
    assert not pace.outdated(CURVE_STEPS - 1)
    assert pace.outdated(CURVE_STEPS)


def test_staggered_admission_is_active_from_full_memory_to_empty_queue() -> None:
    pace = StaggeredAdmission()
    for used, waits, binds in ((0.5, True, False), (FULL_SHARE, True, True), (0.5, True, True), (1.0, False, False)):
        pace.observe(int(used * 1000), 1000, waits=waits)
        assert pace.active is binds


def test_page_watermark_grows_with_recomputed_tokens_and_decays_otherwise() -> None:
    watermark = PageWatermark()
    watermark.observe(0, 200, 200.0, guessed=False)
    assert watermark.sequences == pytest.approx(INITIAL_SEQUENCES + SEQUENCES_STEP)
    watermark.observe(int(200 / RECOMPUTED_SHARE), 200, 200.0, guessed=False)
    assert watermark.sequences == pytest.approx(INITIAL_SEQUENCES)
    watermark.observe(int(1e9), 200, 200.0, guessed=False)
    assert watermark.sequences == MIN_SEQUENCES
    watermark.observe(int(1e9), int(1e8), 200.0, guessed=False)
    assert watermark.sequences == MAX_SEQUENCES


def test_page_watermark_ignores_recomputation_while_lengths_are_guessed() -> None:
    watermark = PageWatermark()
    watermark.observe(100_000, 50_000, 200.0, guessed=True)
    assert watermark.sequences == INITIAL_SEQUENCES
    watermark.observe(100_000, 50_000, 200.0, guessed=False)
    assert watermark.sequences == INITIAL_SEQUENCES


def test_page_watermark_covers_near_steps_and_a_small_share_of_pages() -> None:
    moments = np.array([0, NEAR_STEPS // 2, NEAR_STEPS, 10 * NEAR_STEPS])
    assert PageWatermark().pages(20.0, 4000, moments).tolist() == [
        int(INITIAL_SEQUENCES * 20),
        int(INITIAL_SEQUENCES * 10),
        0,
        0,
    ]
    assert PageWatermark().pages(20.0, 100, moments[:1]).tolist() == [int(MAX_PAGE_SHARE * 100)]


@pytest.mark.parametrize(("max_tokens", "starts"), [(64, 12), (320, 4)])
def test_admission_starts_as_many_ignore_eos_samples_as_fit(max_tokens: int, starts: int) -> None:
    """Lengths are known here and need no estimate, so no sample is preempted."""
    info = msgspec.structs.replace(INFO, num_pages=100)
    ports = LengthWorker(info, np.full((15, 1), max_tokens), delay=1)
    manager = Manager(EngineConfig(model="simulated", run_ahead=2), info, ports, None, lambda: 0.0)
    sure = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    ports.inbox += [submit(rid, [rid + 1] * 60, msgspec.structs.replace(sure, seed=rid)) for rid in range(15)]
    manager.turn()
    assert manager.table.sequences_running == starts
    while manager.intake.requests:
        if not manager.turn():
            ports.wait(0)
    assert manager.reclaimer.preemptions == 0


def test_admission_count_is_bounded_by_the_token_budget() -> None:
    manager = make_manager(engine_info(max_running=64, num_pages=4096, max_model_len=64))[0]
    for rid in range(50):
        manager.intake.take(submit(rid, [rid % 40 + 1] * 20, SamplingParams(max_tokens=4)))
    admission, waiting, shares = manager.scheduler.admission, manager.scheduler.waiting, manager.scheduler.fair_shares
    for budget, starts in ((1, 1), (20, 1), (21, 2), (61, 4), (10_000, 50)):
        allowed, _ = admission.count(lambda most: shares.turns(most, waiting.classes()), 0.0, budget)
        assert allowed == starts


@pytest.mark.parametrize(("pages", "prompt", "length"), [(100, 8, 320), (100, 16, 160), (200, 600, 100)])
def test_tiny_kv_cache_runs_as_many_samples_as_fit_at_a_time(pages: int, prompt: int, length: int) -> None:
    info = msgspec.structs.replace(INFO, num_pages=pages)
    requests = 24
    filled = fill(info, np.full((requests, 1), length), prompt=prompt, max_tokens=length)
    at_once = pages // -(-(prompt + length) // info.page_size)
    assert filled.steps <= 1.6 * length * requests / at_once
