"""Drafts are chosen by what steps cost: they gain what they can, and lose next to nothing, whatever steps take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tok_core.manager.speculation.acceptance import WINDOW, Acceptance
from tok_core.manager.speculation.step_costs import ASSUMED_ROWS, FORGET_STEPS, MIN_GAIN, DraftCandidate, StepCosts
from tok_core.worker.startup.dummy_steps import dummy_step


class World:
    """Steps of `sequences` rows and their drafts, on a device that takes base + row · rows ** power a step.

    queued, wait  seconds lost by a step that was queued, and by one before which the manager waited
    noise         share by which a step may take longer
    pass_seconds  seconds of a pass of the draft model; None: there is none, and drafts cost nothing
    """

    def __init__(
        self,
        sequences: int,
        *,
        base: float = 1e-3,
        row: float = 1e-5,
        power: float = 1.0,
        queued: float = 0.0,
        wait: float = 2e-4,
        noise: float = 0.0,
        pass_seconds: float | None = None,
    ) -> None:
        self.costs = StepCosts(measured=True, pass_share=0.1)
        self.pass_seconds = pass_seconds
        self.sequences, self.base, self.row, self.power = sequences, base, row, power
        self.queued, self.wait, self.noise = queued, wait, noise
        self.now, self.tokens, self.drafted = 0.0, 0, 0
        self._rng = np.random.default_rng(0)
        self._drafted_before = False

    def device(self, rows: int) -> float:
        return float(self.base + self.row * rows**self.power)

    def run(self, steps: int, claimed: float, accepted: float, most: int = 8) -> None:
        """Run steps. The i-th token of a draft is said to be accepted with probability claimed ** i."""
        chances = np.repeat(claimed ** np.arange(1.0, most + 1), self.sequences)
        candidates = [DraftCandidate(chances[:0])]
        candidates += [DraftCandidate(chances[: passes * self.sequences], passes) for passes in range(1, most + 1)]
        for _ in range(steps):
            if self.pass_seconds is None:
                passes, drafted = 0, self.costs.choose(self.sequences, chances)
            else:
                passes, drafted = self.costs.choose_among(self.sequences, candidates)
            waited = bool(drafted) or self._drafted_before
            rows = self.sequences + drafted
            device = self.device(rows) * (1 + self.noise * self._rng.random() ** 4)
            got = int(
                np.count_nonzero(self._rng.random(drafted) < accepted ** (np.arange(drafted) // self.sequences + 1))
            )
            lent = SimpleNamespace(lent=np.zeros((self.sequences, passes)), chunk_slot=())
            step: Any = SimpleNamespace(prefill_token=(), decode_slot=range(rows), drafts=lent if passes else None)
            self.costs.sent(step, drafted, waited=waited)
            draft_seconds = passes * (self.pass_seconds or 0.0) * (1 + self.noise * self._rng.random() ** 4)
            self.now += device + draft_seconds + (self.wait if waited else self.queued)
            self.costs.returned(self.now, got, device + draft_seconds, draft_seconds)
            self.tokens += self.sequences + got
            self.drafted += drafted
            self._drafted_before = bool(drafted)

    def speed_up(self) -> float:
        """Return tokens per second, divided by those without drafts."""
        plain = (self.device(self.sequences) * (1 + self.noise / 5) + self.queued) / self.sequences
        return self.tokens * plain / self.now


@settings(max_examples=60)
@given(
    sequences=st.sampled_from([1, 2, 7, 16, 100, 600]),
    row=st.sampled_from([0.0, 1e-6, 1e-5, 1e-4, 1e-3]),
    power=st.sampled_from([0.5, 1.0, 1.5]),
    wait=st.sampled_from([0.0, 1e-4, 1e-3, 5e-3]),
    claimed=st.sampled_from([0.1, 0.5, 0.9, 0.99]),
    noise=st.sampled_from([0.0, 0.3]),
    pass_seconds=st.sampled_from([None, 1e-5, 1e-4, 1e-3, 1e-2]),
)
def test_drafts_that_are_never_accepted_cost_at_most_two_percent(
    sequences: int, row: float, power: float, wait: float, claimed: float, noise: float, pass_seconds: float | None
) -> None:
    world = World(sequences, row=row, power=power, wait=wait, noise=noise, pass_seconds=pass_seconds)
    world.run(3000, claimed, accepted=0.0)
    assert world.speed_up() > 0.98


@pytest.mark.parametrize(
    ("sequences", "row", "least"), [(1, 1e-6, 4.0), (16, 1e-5, 2.2), (64, 1e-5, 1.5), (64, 1e-4, 1.0), (512, 1e-3, 1.0)]
)
def test_drafts_that_are_accepted_pay(sequences: int, row: float, least: float) -> None:
    world = World(sequences, row=row)
    world.run(1000, 0.9, accepted=0.9)
    assert world.speed_up() > least - 0.01


@pytest.mark.parametrize(
    ("sequences", "pass_seconds", "least", "most"),
    [(1, 1e-4, 2.5, 3.5), (1, 5e-4, 1.25, 1.6), (16, 1e-4, 1.7, 2.2), (1, 2e-3, 0.99, 1.0), (600, 1e-3, 0.99, 1.4)],
)
def test_passes_of_a_draft_model_are_counted(sequences: int, pass_seconds: float, least: float, most: float) -> None:
    world = World(sequences, row=1e-6 if sequences == 1 else 1e-5, pass_seconds=pass_seconds)
    world.run(1000, 0.9, accepted=0.9)
    assert least < world.speed_up() < most


def test_text_that_turns_unpredictable_costs_little() -> None:
    world = World(16)
    world.run(500, 0.9, accepted=0.9)
    tokens, before = world.tokens, world.now
    world.run(1000, 0.9, accepted=0.0)
    assert world.now - before < 1.02 * 1000 * world.device(16)
    assert world.tokens - tokens == 1000 * 16


def test_best_number_of_drafts_is_chosen() -> None:
    costs, chances = StepCosts(measured=False), np.sort(np.random.default_rng(1).random(300))[::-1]
    for sequences in (1, 5, 30, 200):
        seconds = [1 + (sequences + k) / ASSUMED_ROWS + (0.25 if k else 0) for k in range(301)]
        speeds = [(sequences + chances[:k].sum()) / seconds[k] / (MIN_GAIN if k else 1) for k in range(301)]
        assert costs.choose(sequences, chances) == int(np.argmax(speeds))
    assert costs.choose(50, np.full(50, 0.1)) == 0


def test_sizes_are_tried_by_doubling_and_forgotten() -> None:
    world = World(4, row=0.0, wait=0.0)
    assert world.costs.choose(4, np.ones(64)) == 0, "the time of a plain step is unknown"
    largest = []
    for _ in range(12):
        world.run(1, 1.0, accepted=1.0, most=16)
        largest.append(world.costs.choose(4, np.ones(60)))
    assert largest == [0, 4, 4, 12, 12, 28, 28, 60, 60, 60, 60, 60]
    world.run(FORGET_STEPS + 1, 0.0, accepted=0.0)
    assert world.costs.choose(4, np.ones(60)) == 4


def test_slow_step_of_few_rows_does_not_make_more_rows_seem_free() -> None:
    """A prompt of one token is computed kernel by kernel, and takes longer than a CUDA graph of many rows."""
    costs, now = StepCosts(measured=True, assumed_wait=0.0), 0.0
    for rows, seconds in ((1, 9e-3), (20, 1.4e-3), (300, 4e-3), (20, 1.4e-3)) * 3:
        costs.sent(dummy_step(decode=rows), 0, waited=False)
        now += seconds
        costs.returned(now, 0, seconds)
    chances = np.repeat(0.78 ** np.arange(1, 17), 20)
    speeds = [(20 + chances[:k].sum()) / (1.4 + 2.6 * k / 280) for k in range(len(chances) + 1)]
    assert costs.choose(20, chances) == pytest.approx(int(np.argmax(speeds)), abs=20)


def test_shares_are_those_of_the_family_and_of_all_while_it_is_new() -> None:
    acceptance, one = Acceptance(), np.ones(1000, np.uint64)
    rng = np.random.default_rng(0)
    score = np.full(1000, 5, np.int32)
    acceptance.observe(one, score, rng.random(1000) < 0.9)
    acceptance.observe(one, np.zeros(1000, np.int32), np.zeros(1000, np.bool_))  # nothing was predicted
    both = np.array([1, 2], np.uint64)
    assert acceptance.share(both, score[:2]) == pytest.approx([0.9, 0.9], abs=0.03)
    assert acceptance.share(both, score[:2] + 1) == pytest.approx([0.5, 0.5])
    for _ in range(4):
        acceptance.observe(2 * one[:WINDOW], score[:WINDOW], np.zeros(WINDOW, np.bool_))
    assert acceptance.share(both, score[:2]) == pytest.approx([0.9, 0.0], abs=0.05)
    for _ in range(9):
        acceptance.observe(one[:WINDOW], score[:WINDOW], np.zeros(WINDOW, np.bool_))
    assert acceptance.share(both, score[:2])[0] < 0.1, "what was seen long ago counts less"
