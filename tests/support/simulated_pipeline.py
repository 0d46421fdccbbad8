"""Run a manager over a simulated pipeline, in simulated time, to measure pipeline bubbles and the cost of slow links.

All times of a step follow from those of earlier steps, so no event queue is needed. A stage begins a step when it is
free and the activations of the stage before have arrived over the link. The first stage also waits until the sampled
tokens that it needs are back.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from tok_core.config import EngineConfig
from tok_core.manager import Manager
from tok_core.messages import EngineInfo, Progress, StepInput, StepOutput, ToManager
from tok_server.bench.manager.simulation import LengthSampler, SimulatedWorker


@dataclass(frozen=True, slots=True)
class Card:
    """Rates that one device reaches in practice, not by its data sheet.

    flops      FLOP of GEMMs per second
    bandwidth  bytes read from its memory per second
    overhead   seconds per step that are neither
    """

    flops: float
    bandwidth: float
    overhead: float = 0.5e-3


@dataclass(frozen=True, slots=True)
class Link:
    """Link from one device to the next: bytes per second, and seconds until the first byte has arrived."""

    bandwidth: float
    latency: float


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """Model sizes that determine the time of a step, in elements of two bytes.

    parameters  of all layers
    head        parameters of the LM head
    kv          elements of keys and values of one position in all layers
    """

    layers: int
    hidden: int
    parameters: float
    head: float
    kv: int

    def seconds(self, step: StepInput, card: Card, devices: int) -> float:
        """Return the seconds that one of `devices` devices takes for its even share of a step.

        Only the longer of the times for GEMMs and for reading weights counts. KV cache reads and the overhead are
        added.
        """
        tokens = len(step.decode_slot) + len(step.prefill_token)
        products = 2 * (tokens * self.parameters + len(step.sample_slot) * self.head) / card.flops
        weights = 2 * (self.parameters + self.head) / card.bandwidth
        cache = 2 * self.kv * self._positions(step) / card.bandwidth
        return (max(products, weights) + cache) / devices + card.overhead

    def _positions(self, step: StepInput) -> float:
        """Return the number of KV cache positions that the step reads.

        A decode row reads half of `max_kv`, because lengths are taken to be evenly spread. A prefill chunk reads each
        of its positions once.
        """
        return len(step.decode_slot) * step.max_kv / 2 + float((step.prefill_start + step.prefill_count).sum())


L40S = Card(flops=250e12, bandwidth=750e9)  # 362e12 and 864e9 by its data sheet
PCIE4 = Link(bandwidth=20e9, latency=20e-6)  # 16 lanes: 31.5e9 by the standard
NVLINK = Link(bandwidth=300e9, latency=5e-6)
LLAMA_70B = PipelineShape(layers=80, hidden=8192, parameters=68.4e9, head=1.05e9, kv=80 * 2 * 8 * 128)


@dataclass
class PipelineTimeline:
    """Times at which each stage runs each step, in seconds since the start.

    busy   seconds that each stage has been busy
    ended  when the last stage has finished the last step
    """

    shape: PipelineShape
    card: Card
    link: Link
    stages: int
    ranks: int = 1
    busy: list[float] = field(init=False)
    ended: float = 0.0
    _free: list[float] = field(init=False)
    _link_free: list[float] = field(init=False)
    _back: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.busy, self._free, self._link_free = ([0.0] * self.stages for _ in range(3))

    def add(self, step: StepInput, now: float) -> float:
        """Send a step at time `now`; return when its tokens are back."""
        tokens = len(step.decode_slot) + len(step.prefill_token)
        seconds = self.shape.seconds(step, self.card, self.stages * self.ranks) + self._exchange(tokens)
        ready = max(now, self._back.get(step.sampled_upto, 0.0))
        for stage in range(self.stages):
            begins = max(ready, self._free[stage])
            self._free[stage] = ends = begins + seconds
            self.busy[stage] += seconds
            if stage < self.stages - 1:
                sent = max(ends, self._link_free[stage]) + 2 * tokens * self.shape.hidden / self.link.bandwidth
                self._link_free[stage] = sent
                ready = sent + self.link.latency
        self.ended = self._free[-1]
        self._back[step.step] = self.ended + self.link.latency
        return self._back[step.step]

    def _exchange(self, tokens: int) -> float:
        """Return the seconds that tensor-parallel ranks communicate in a step, on one stage.

        Twice per layer, an all-gather and a reduce-scatter send all activations around the ring.
        """
        share = (self.ranks - 1) / self.ranks
        each = 2 * (2 * tokens * self.shape.hidden * share / self.link.bandwidth + (self.ranks - 1) * self.link.latency)
        return 2 * self.shape.layers / self.stages * each if self.ranks > 1 else 0.0


class TimedPorts:
    """Ports of a manager whose steps take simulated time. The caller that drives the manager sets `now`."""

    def __init__(self, worker: SimulatedWorker, timeline: PipelineTimeline) -> None:
        self.now = 0.0
        self.inbox: list[ToManager] = []
        self.tokens = self.steps = 0
        self._worker = worker
        self._timeline = timeline
        self._outputs: deque[tuple[float, StepOutput]] = deque()

    @property
    def next_output(self) -> float | None:
        """Return when the next tokens are back; None if no step is in flight."""
        return self._outputs[0][0] if self._outputs else None

    def requests(self) -> list[ToManager]:
        arrived, self.inbox = self.inbox, []
        return arrived

    def outputs(self) -> list[StepOutput]:
        found = []
        while self._outputs and self._outputs[0][0] <= self.now:
            found.append(self._outputs.popleft()[1])
        return found

    def send(self, step: StepInput) -> None:
        self.steps += 1
        before = sum(self._timeline.busy)
        back = self._timeline.add(step, self.now)
        seconds = (sum(self._timeline.busy) - before) / self._timeline.stages
        self._outputs.append((back, self._worker.run(step, seconds)))

    def report(self, progress: Progress) -> None:
        self.tokens += len(progress.token)

    def wait(self, seconds: float) -> None:
        raise AssertionError("simulated time does not pass by waiting")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a period of simulated time: tokens per second that came back, and the stages' share of idle time."""

    tokens_per_second: float
    bubble: float


class PipelineSimulation:
    """Manager of a pipeline over its simulation; requests reach the manager without delay.

    turn_seconds  simulated seconds per turn of the manager
    """

    def __init__(
        self, info: EngineInfo, lives: LengthSampler, timeline: PipelineTimeline, turn_seconds: float = 1e-3
    ) -> None:
        self.timeline = timeline
        self.ports = TimedPorts(SimulatedWorker(info, lives), timeline)
        config = EngineConfig(model="simulated", pp=timeline.stages)
        # Its clock stands still: a slow machine makes no simulated sample wait for long.
        self.manager = Manager(config, info, self.ports, None, lambda: 0.0)
        self._turn_seconds = turn_seconds

    def run(self, steps: int) -> Outcome:
        """Run until `steps` more steps have been sent, or nothing is left to do."""
        ports, timeline = self.ports, self.timeline
        last, began, busy, tokens = ports.steps + steps, timeline.ended, np.array(timeline.busy), ports.tokens
        while ports.steps < last:
            if self.manager.turn():
                ports.now += self._turn_seconds
            elif ports.next_output is None:
                break
            else:
                ports.now = max(ports.now, ports.next_output)
        seconds = timeline.ended - began
        if not seconds:
            return Outcome(0.0, 0.0)
        idle = 1 - float((np.array(timeline.busy) - busy).mean()) / seconds
        return Outcome((ports.tokens - tokens) / seconds, idle)
