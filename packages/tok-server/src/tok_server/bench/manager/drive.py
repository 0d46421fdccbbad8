"""Keep the slots of a simulated engine full and measure the CPU cost of its manager's steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np

from tok_core.messages import Cancel
from tok_server.bench.manager.load import Load
from tok_server.bench.manager.profiler import ManagerProfiler, Part
from tok_server.bench.manager.simulation import Simulation

MAX_FILL_FACTOR = 4  # limit on the steps that filling all slots may take, as a multiple of the planned ones

AfterTurn = Callable[[], None]
"""Callback after every turn of the manager's loop."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """The cost of a number of steps.

    seconds  CPU time of the manager
    tokens   generated tokens that were reported to the engine
    running  sequences running at the end
    sizes    bytes to the worker, from the worker, and to the engine
    parts    seconds by part; empty unless a profiler was given
    """

    seconds: float
    steps: int
    tokens: int
    running: int
    sizes: tuple[int, int, int]
    parts: dict[Part, float]


class ManagerDriver:
    """Driver of a simulated manager; it keeps 1.5 times as many unfinished samples as there are slots."""

    def __init__(self, load: Load, simulation: Simulation) -> None:
        self.load = load
        self.simulation = simulation
        self._rng = np.random.default_rng(4)
        self._submitted = 0  # samples submitted, without the cancelled ones
        self._open: list[int] = []  # ids of open requests, oldest first; only if the workload replaces some

    @property
    def running(self) -> int:
        """Return the number of sequences that have a slot."""
        return self.simulation.manager.stats().sequences_running

    def fill(self, after_turn: AfterTurn) -> None:
        """Run until all slots are taken, then run the workload's warm-up steps.

        Filling gives up after MAX_FILL_FACTOR times the planned steps.
        """
        ports = self.simulation.ports
        while ports.steps < MAX_FILL_FACTOR * self.load.fill_steps and self.running < self.load.sequences:
            self._turn()
            after_turn()
        self.block(self.load.warm_up, after_turn)

    def block(self, steps: int, after_turn: AfterTurn, profiler: ManagerProfiler | None = None) -> StepCost:
        """Measure the next `steps` steps."""
        last = self.simulation.ports.steps + steps
        return self._measure(lambda: self.simulation.ports.steps < last, self._turn, after_turn, profiler)

    def start_all(self, after_turn: AfterTurn, profiler: ManagerProfiler | None) -> StepCost:
        """Submit one request per slot at once and measure all steps until as many sequences run."""
        for _ in range(self.load.sequences):
            self._submit_next()
        return self._measure(lambda: self.running < self.load.sequences, self.simulation.turn, after_turn, profiler)

    def _measure(
        self,
        unfinished: Callable[[], bool],
        turn: Callable[[], float],
        after_turn: AfterTurn,
        profiler: ManagerProfiler | None,
    ) -> StepCost:
        seconds, before = 0.0, self._counts()
        with nullcontext() if profiler is None else profiler.timing(self.simulation.manager):
            while unfinished():
                seconds += turn()
                after_turn()
        steps, tokens, *sizes = (new - old for new, old in zip(self._counts(), before, strict=True))
        parts = {} if profiler is None else profiler.seconds
        return StepCost(seconds, steps, tokens, self.running, (sizes[0], sizes[1], sizes[2]), parts)

    def _counts(self) -> tuple[int, int, int, int, int]:
        ports = self.simulation.ports
        return ports.steps, ports.tokens, ports.input_bytes, ports.output_bytes, ports.progress_bytes

    def _turn(self) -> float:
        """Replace the samples that ended, then run one turn of the manager's loop. Returns its CPU seconds."""
        self._replace()
        while self._submitted - self.simulation.ports.finished < 1.5 * self.load.sequences:
            self._submit_next()
        return self.simulation.turn()

    def _submit_next(self) -> None:
        request = next(self.load.requests)
        self.simulation.submit(request)
        self._submitted += request.params.n
        if self.load.replaced_share:
            self._open.append(request.rid)

    def _replace(self) -> None:
        if not self.load.replaced_share or len(self._open) < self.load.sequences:
            return
        count = max(1, int(self.load.replaced_share * self.load.sequences))
        for position in sorted(self._rng.choice(self.load.sequences, count, replace=False).tolist(), reverse=True):
            self.simulation.submit(Cancel(self._open.pop(position)))
        self._submitted -= count
