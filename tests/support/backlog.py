"""Simulate a backlog of samples of unknown lengths, and measure how well a manager fills its memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import numpy as np

from support.schedules import EOS, engine_info, submit
from tok_core import EngineConfig, SamplingParams
from tok_core.config import AdmissionName
from tok_core.manager.loop import Manager
from tok_core.messages import EngineInfo, Progress, StepInput, StepOutput, ToManager

Lengths = Callable[[np.random.Generator, int], np.ndarray]


def geometric(random: np.random.Generator, count: int) -> np.ndarray:
    """Return geometric lengths of mean 128."""
    return random.geometric(1 / 128, count)


def log_normal(random: np.random.Generator, count: int) -> np.ndarray:
    """Return log-normal lengths of median 90 and mean 148."""
    return np.ceil(random.lognormal(np.log(90), 1.0, count)).astype(np.int64)


def bimodal(random: np.random.Generator, count: int) -> np.ndarray:
    """Return lengths of which half are around 24 and half around 300."""
    return np.where(random.random(count) < 0.5, random.poisson(24, count), random.poisson(300, count)) + 1


class LengthWorker:
    """A worker that ends sample i of request r after `lengths[r, i]` tokens and returns steps `delay` steps late."""

    def __init__(self, info: EngineInfo, lengths: np.ndarray, delay: int) -> None:
        self.lengths = lengths
        self.delay = delay
        self.length = np.zeros(info.max_running, np.int64)
        self.end = np.zeros(info.max_running, np.int64)
        self.inbox: list[ToManager] = []
        self.queued: deque[StepOutput] = deque()
        self.tokens = self.prefills = 0
        self.idle = False

    def requests(self) -> list[ToManager]:
        inbox, self.inbox = self.inbox, []
        return inbox

    def outputs(self) -> list[StepOutput]:
        if self.queued and (self.idle or len(self.queued) > self.delay):
            self.idle = False
            return [self.queued.popleft()]
        return []

    def send(self, step: StepInput) -> None:
        self.prefills += len(step.prefill_slot) > 0
        new = step.new
        if new is not None:
            self.length[new.slot] = new.length
            self.end[new.slot] = new.prompt_len + self.lengths[new.sampling["seed"], new.sample]
        self.length[step.decode_slot] += 1
        self.length[step.prefill_slot] = step.prefill_start + step.prefill_count
        slots = step.sample_slot
        token = np.where(self.length[slots] + 1 >= self.end[slots], EOS, 0).astype(np.int32)
        none = np.empty((len(slots), 0))
        self.queued.append(
            StepOutput(step.step, token, np.zeros(len(slots), np.float32), none.astype(np.int32), none, 0.25, 0.5)
        )

    def report(self, progress: Progress) -> None:
        self.tokens += len(progress.token)

    def wait(self, seconds: float) -> None:
        self.idle = True


@dataclass
class Filled:
    """Fractions: of pages used, of samples preempted, and recomputed tokens relative to tokens computed once.

    Pages count only in turns after which requests wait in the backlog. `pages` counts from the first turn on, when
    memory is empty and no length is known; `pages_settled` counts once a fifth of the tokens are generated. The tail of
    the run, when no request is left to fill memory, does not count. `prefills` counts steps with a prefill.
    """

    pages: float
    pages_settled: float
    preempted: float
    recomputed: float
    steps: int
    prefills: int
    computed: int


def fill(
    info: EngineInfo,
    lengths: np.ndarray,
    prompt: int | np.ndarray,
    max_tokens: int | np.ndarray,
    shared: int = 0,
    admission: AdmissionName = "forecast",
) -> Filled:
    """Run requests with sample `lengths` [requests, samples], all submitted at once, to their end.

    `prompt` and `max_tokens` are token counts, of all requests or [requests] of each.
    """
    requests, samples = lengths.shape
    prompts, limits = np.broadcast_to(prompt, requests), np.broadcast_to(max_tokens, requests)
    ports = LengthWorker(info, np.minimum(lengths, limits[:, None]), delay=1)
    config = EngineConfig(model="simulated", run_ahead=2, admission=admission)
    manager = Manager(config, info, ports, None, lambda: 0.0)
    random = np.random.default_rng(7)
    for rid in range(requests):
        ids = random.integers(10, info.vocab_size, prompts[rid])
        ids[:shared] = 9
        params = SamplingParams(n=samples, max_tokens=int(limits[rid]), seed=rid)
        ports.inbox.append(submit(rid, ids.tolist(), params))
    used, settled_counters, total = [], [], int(ports.lengths.sum())
    while True:
        if not manager.turn():
            if not manager.intake.requests:
                break
            ports.wait(0)
        if manager.scheduler.waiting:
            used.append(manager.paging.used / info.num_pages)
            if ports.tokens > total / 5:
                settled_counters.append(used[-1])
    assert ports.tokens == total
    stats = manager.stats()
    once = total - ports.lengths.size + int(prompts.sum())
    return Filled(
        float(np.mean(used)),
        float(np.mean(settled_counters)) if settled_counters else 0.0,
        stats.preemptions / ports.lengths.size,
        (stats.computed_tokens - stats.discarded_tokens + 0.0) / once - 1,
        stats.steps,
        ports.prefills,
        stats.computed_tokens - stats.discarded_tokens,
    )


def compare_admission() -> None:
    """Print how well each admission policy fills memory: `PYTHONPATH=tests python -m support.backlog`."""
    info = engine_info(
        page_size=16, num_pages=4096, max_running=2048, max_step_tokens=8192, max_model_len=2048, vocab_size=1000
    )
    policies: tuple[AdmissionName, ...] = get_args(AdmissionName)
    for lengths in (geometric, log_normal, bimodal):
        for admission in policies:
            samples = lengths(np.random.default_rng(1), 3500).reshape(-1, 1)
            found = fill(info, samples, prompt=100, max_tokens=1024, admission=admission)
            print(
                f"{lengths.__name__:10} {admission:9} pages {found.pages_settled:.1%}",
                f"preempted {found.preempted:.1%}",
                f"recomputed {found.recomputed:.1%}",
                f"{found.steps} steps",
                sep=", ",
            )


if __name__ == "__main__":
    compare_admission()
