"""A simulated GPU whose steps take given times, and samples in a Markov language: what speculation gains there."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from msgspec import structs

from support.schedules import EOS, engine_info, submit
from tok_core import EngineConfig, SamplingParams
from tok_core.config import Speculate
from tok_core.manager.loop import Manager
from tok_core.messages import EngineInfo, Int64, ModelDrafts, Progress, StepInput, StepOutput, ToManager, VerifyRows
from tok_core.worker.cuda_graphs import graph_sizes

FIRST = 10  # first token of the language
SCHEDULE, LAUNCH, OUTPUT = 0.2e-3, 0.25e-3, 0.15e-3  # seconds of the host for a step, one after the other


@dataclass(frozen=True)
class SimulatedDraft:
    """A draft model whose tokens are those of the target model with probability `accuracy`.

    pass_seconds   device time of a pass
    token_seconds  device time of a token that it reads before it drafts
    """

    accuracy: float
    pass_seconds: float
    token_seconds: float = 5e-6


class SimulatedGpu:
    """A worker in simulated time. Each token is followed by its successor with `probability`, else by any one.

    Sampled tokens depend on seed, sample, position and the token before, as those of a model with one layer of memory.

    states       tokens of the language
    end          probability that a token ends its sample
    seconds      device time of a step, by its rows; `stages` devices of a pipeline take even shares of it
    delay        seconds by which the first step of each number of rows takes longer
    capture      seconds of the host to capture a CUDA graph, before the first step of its size
    draft        the draft model; None: there is none
    """

    def __init__(
        self,
        info: EngineInfo,
        states: int,
        probability: float,
        end: float,
        seconds: Callable[[int], float],
        delay: float = 0.0,
        capture: float = 0.0,
        draft: SimulatedDraft | None = None,
        stages: int = 1,
    ) -> None:
        self.draft = draft
        self.capture = capture
        self.graph_sizes, self.captured = graph_sizes(info.max_running), set[int]()
        self._chance = np.random.default_rng(1)
        self.states, self.probability, self.end, self.seconds, self.delay = states, probability, end, seconds, delay
        self.sizes: set[int] = set()  # numbers of rows, as powers of two
        # Seconds; `launched` and `free`: when the worker has launched, and each device has computed, all steps sent.
        self.now = self.launched = 0.0
        self.free = [0.0] * stages
        self.sampled = [0.0]  # when the tokens of each step are sampled, by its number
        self.inbox: list[ToManager] = []
        self.queued: deque[tuple[float, StepOutput]] = deque()
        self.reports: list[tuple[float, int, int]] = []  # time, tokens, samples that ended
        self.slots = {name: np.zeros(info.max_running, np.int64) for name in ("length", "last_token", "seed", "sample")}
        # How often a token has followed another; only for languages whose tokens are drafted by the worker.
        self.followed = np.zeros((states, states) if draft is None else (0, 0), np.int32)

    def requests(self) -> list[ToManager]:
        inbox, self.inbox = self.inbox, []
        return inbox

    def outputs(self) -> list[StepOutput]:
        if not self.queued or self.queued[0][0] > self.now:
            return []
        self.now += OUTPUT
        return [self.queued.popleft()[1]]

    def send(self, step: StepInput) -> None:
        length, last = self.slots["length"], self.slots["last_token"]
        if (new := step.new) is not None:
            length[new.slot], last[new.slot] = new.length, new.last_token
            self.slots["seed"][new.slot], self.slots["sample"][new.slot] = new.sampling["seed"], new.sample
        if (moves := step.moves) is not None:
            for name in ("seed", "sample"):
                self.slots[name][moves.slot] = self.slots[name][moves.source]
            length[moves.slot], last[moves.slot] = moves.length, moves.last_token
        draft_token, draft_seconds = np.empty((0, 0), np.int32), 0.0
        if step.drafts is not None:
            draft_token, draft_seconds = self._draft(step.drafts)
        rows = step.verify_rows
        drafted = None if rows is None else self._set_verify_rows(rows)
        length[step.decode_slot] += 1
        length[step.prefill_slot] = step.prefill_start + step.prefill_count
        last[step.prefill_slot] = step.prefill_token[np.cumsum(step.prefill_count) - 1]
        token = self._sample(step.sample_slot, length[step.sample_slot], last[step.sample_slot])
        predictable = np.empty(0, np.int32)
        if self.draft is None:
            fed = last[step.decode_slot]
            predictable = (self._predict(fed) == token[: len(fed)]).astype(np.int32)
            np.add.at(self.followed, (fed - FIRST, (token[: len(fed)] - FIRST) % self.states), fed >= FIRST)
        last[step.sample_slot] = token
        accepted = np.empty(0, np.int32) if rows is None or drafted is None else self._accept(rows, drafted)
        self.now += SCHEDULE
        graph = self.graph_sizes[bisect_left(self.graph_sizes, len(step.decode_slot))]
        capture_seconds = 0.0 if graph in self.captured else self.capture
        self.captured.add(graph)
        size = len(step.decode_slot) + len(step.prefill_token)
        seconds = self.seconds(size) + self.delay * (size.bit_length() not in self.sizes) + draft_seconds
        self.sizes.add(size.bit_length())
        self.launched = max(self.launched, self.now) + LAUNCH + capture_seconds
        ready = max(self.launched, self.sampled[step.sampled_upto])
        share = seconds / len(self.free)
        for stage, free in enumerate(self.free):
            self.free[stage] = ready = max(free, ready) + share
        self.sampled.append(ready)
        none = np.empty((len(token), 0))
        logprob = np.zeros(len(token), np.float32)
        output = StepOutput(
            *(step.step, token, logprob, none.astype(np.int32), none, LAUNCH, share),
            draft_token=draft_token,
            accepted=accepted,
            predictable=predictable,
            draft_seconds=draft_seconds,
            capture_seconds=capture_seconds,
        )
        self.queued.append((ready, output))

    def _predict(self, token: Int64) -> Int64:
        """Return the token that has followed each token most often; -1 if none has."""
        counts = self.followed[np.maximum(token - FIRST, 0)]
        found: Int64 = np.where((token >= FIRST) & counts.any(axis=1), counts.argmax(axis=1) + FIRST, -1)
        return found

    def _set_verify_rows(self, rows: VerifyRows) -> Int64:
        """Let the lent slots feed predicted tokens; return these, or -1."""
        drafted, token = np.full(rows.lent.shape, -1), self.slots["last_token"][rows.parent]
        for i, lent in enumerate(rows.lent.T):
            drafted[:, i] = token = self._predict(token)
            used, slot = rows.parent[lent >= 0], lent[lent >= 0]
            for name in ("seed", "sample"):
                self.slots[name][slot] = self.slots[name][used]
            self.slots["length"][slot] = self.slots["length"][used] + 1 + i
            self.slots["last_token"][slot] = token[lent >= 0]
        return drafted

    def _accept(self, rows: VerifyRows, drafted: Int64) -> np.ndarray:
        """Advance the sequences past accepted drafts; return how many of each are accepted."""
        last, accepted = self.slots["last_token"], np.zeros(len(rows.parent), np.int32)
        going = np.ones(len(accepted), np.bool_)
        for i, lent in enumerate(rows.lent.T):
            going &= (lent >= 0) & (drafted[:, i] == last[rows.parent])
            last[rows.parent[going]] = last[lent[going]]
            accepted += going
        self.slots["length"][rows.parent] += accepted
        return accepted

    def _draft(self, drafts: ModelDrafts) -> tuple[np.ndarray, float]:
        """Draft tokens, make them the last tokens of the slots lent, and return them, and the device time."""
        assert self.draft is not None
        found = np.zeros(drafts.lent.shape, np.int32)
        rows, passes = drafts.lent.shape
        slots, last = drafts.slot[:rows], drafts.token[:rows].astype(np.int64)
        for i in range(passes):
            token = self._sample(slots, drafts.position[:rows] + 1 + i, last)
            wrong = self._chance.random(rows) >= self.draft.accuracy
            found[:, i] = last = np.where(wrong, EOS - 1, token)
            lent = drafts.lent[:, i]
            self.slots["last_token"][lent[lent >= 0]] = last[lent >= 0]
        return found, passes * self.draft.pass_seconds + len(drafts.chunk_token) * self.draft.token_seconds

    def _sample(self, slots: Int64, position: Int64, last: Int64) -> np.ndarray:
        random = np.zeros(len(slots), np.uint64)
        for key in (self.slots["seed"][slots], self.slots["sample"][slots], position):
            random = (random ^ key.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
            random = (random ^ (random >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
            random ^= random >> np.uint64(32)
        other, chance, ends = (random >> np.uint64(shift) & np.uint64(0xFFFF) for shift in (0, 16, 32))
        successor = (last + 1 - FIRST) % self.states
        token = np.where(chance < self.probability * 65536, successor, other.astype(np.int64) % self.states) + FIRST
        return np.where(ends < self.end * 65536, EOS, token).astype(np.int32)

    def report(self, progress: Progress) -> None:
        self.reports.append((self.now, len(progress.token), len(progress.finished)))

    def wait(self, seconds: float) -> None:
        until = self.queued[0][0] if self.queued else np.inf
        self.now = max(self.now, min(until, self.now + seconds))


@dataclass
class Run:
    """Seconds of a whole run, and after three quarters of its samples have ended; drafted and accepted tokens."""

    seconds: float
    tail_seconds: float
    drafted: int
    accepted: int


def run(
    speculate: Speculate,
    prompts: int,
    samples: int,
    seconds: Callable[[int], float],
    *,
    max_tokens: int,
    states: int = 256,
    probability: float = 0.8,
    end: float = 0.0,
    delay: float = 0.0,
    capture: float = 0.0,
    draft: SimulatedDraft | None = None,
    stages: int = 1,
) -> Run:
    """Run samples of random prompts of 64 tokens, all submitted at once, to their end."""
    info = engine_info(
        page_size=16, num_pages=1 << 17, max_running=8192, max_step_tokens=8192, max_model_len=4096, vocab_size=1 << 17
    )
    info = structs.replace(info, device="cuda", drafts_on_device=draft is None and stages == 1)
    if draft is not None:
        info = structs.replace(info, draft_len=info.max_model_len, draft_share=0.15)
    gpu = SimulatedGpu(info, states, probability, end, seconds, delay, capture, draft, stages)
    config = EngineConfig(model="simulated", speculate=speculate, pp=stages)
    manager = Manager(config, info, gpu, None, lambda: gpu.now)
    random = np.random.default_rng(7)
    for rid in range(prompts):
        params = SamplingParams(n=samples, max_tokens=max_tokens, seed=rid, ignore_eos=not end)
        gpu.inbox.append(submit(rid, random.integers(FIRST, info.vocab_size, 64).tolist(), params))
    while (worked := manager.turn()) or manager.intake.requests:
        if not worked:
            gpu.wait(0.01)
    times, _, finished = map(np.array, zip(*gpu.reports, strict=True))
    tail = times[np.searchsorted(np.cumsum(finished), 0.75 * prompts * samples)]
    stats = manager.stats()
    return Run(gpu.now, gpu.now - float(tail), stats.drafted_tokens or 0, stats.accepted_tokens or 0)
