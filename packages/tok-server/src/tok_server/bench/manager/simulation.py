"""Run a manager over a worker that computes nothing, to measure the manager's own cost.

Every message is encoded and decoded as between processes. `Simulation.turn` measures neither the worker nor its side of
the encoding.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from tok_core.config import EngineConfig
from tok_core.manager import MIN_QUEUED_STEPS, Manager
from tok_core.messages import EngineInfo, FromWorker, Int64, Progress, StepInput, StepOutput, ToManager, decoder, encode
from tok_server.bench.workloads.workload import split_mix

LengthSampler = Callable[[NDArray[np.float64]], Int64]
"""Maps uniform random numbers [n] in [0, 1) to the tokens [n], at least 1, that samples generate before an end id."""


class SimulatedWorker:
    """Worker that returns random tokens. The length of a sample depends on its seed and index alone."""

    def __init__(self, info: EngineInfo, lives: LengthSampler) -> None:
        self._end, self._vocab = info.eos_token_ids[0], info.vocab_size
        self._lives = lives
        self._rng = np.random.default_rng(0)
        self._length = np.zeros(info.max_running, np.int64)
        self._ends_at = np.zeros(info.max_running, np.int64)  # length in the cache at which the end id is sampled

    def run(self, step: StepInput, seconds: float) -> StepOutput:
        """Return the tokens of `step`, which reports `seconds` as its time on the device."""
        if (new := step.new) is not None:
            self._length[new.slot] = new.length
            life = self._lives(_uniform(new.sampling["seed"], new.sample))
            self._ends_at[new.slot] = np.maximum(new.prompt_len + life - 1, new.eos_from_position)
        self._length[step.decode_slot] += 1
        self._length[step.prefill_slot] = step.prefill_start + step.prefill_count
        slots, count = step.sample_slot, len(step.sample_slot)
        token = self._rng.integers(0, self._vocab - 1, count, np.int32)
        token += token >= self._end  # every id but the end id
        token[self._length[slots] >= self._ends_at[slots]] = self._end
        top = np.zeros((count, step.top_logprobs), np.int32)
        logprob = np.zeros(count, np.float32)
        return StepOutput(step.step, token, logprob, top, top.astype(np.float32), 0.0, seconds)


class SimulatedPorts:
    """Ports of a manager that carry messages as bytes, and the other ends of these ports: `submit` and `work`.

    step_seconds  seconds per step, one after the other. 0: tokens are ready at once, but are delivered only when two
                  steps are queued or nothing is left to schedule, so that the manager runs ahead
    """

    def __init__(self, worker: SimulatedWorker, step_seconds: float) -> None:
        self._worker = worker
        self._step_seconds = step_seconds
        self._requests: deque[bytes] = deque()
        self._steps: deque[bytes] = deque()
        self._outputs: deque[tuple[float, bytes]] = deque()  # (time at which it is ready, StepOutput)
        self._idle = False
        self._to_manager = decoder(ToManager)
        self._from_worker = decoder(FromWorker)
        self._to_worker = decoder(StepInput)
        self.steps = self.tokens = self.finished = 0
        self.input_bytes = self.output_bytes = self.progress_bytes = 0

    def submit(self, message: bytes) -> None:
        """Queue an encoded Submit or Cancel."""
        self._requests.append(message)

    def work(self) -> None:
        """Run the steps that have been sent."""
        while self._steps:
            began = max(time.monotonic(), self._outputs[-1][0] if self._outputs else 0.0)
            step: StepInput = self._to_worker.decode(self._steps.popleft())
            output = encode(self._worker.run(step, self._step_seconds))
            self.output_bytes += len(output)
            self._outputs.append((began + self._step_seconds, output))

    def requests(self) -> list[ToManager]:
        arrived = [self._to_manager.decode(one) for one in self._requests]
        self._requests.clear()
        return arrived

    def outputs(self) -> list[StepOutput]:
        there: list[StepOutput] = []
        while self._outputs and self._may_come(len(there)):
            there.append(self._from_worker.decode(self._outputs.popleft()[1]))
        self._idle = False
        return there

    def _may_come(self, already: int) -> bool:
        if self._step_seconds:
            return self._outputs[0][0] <= time.monotonic()
        return not already and (self._idle or len(self._outputs) >= MIN_QUEUED_STEPS)

    def send(self, step: StepInput) -> None:
        message = encode(step)
        self.steps += 1
        self.input_bytes += len(message)
        self._steps.append(message)

    def report(self, progress: Progress) -> None:
        self.tokens += len(progress.token)
        self.finished += len(progress.finished)
        self.progress_bytes += len(encode(progress))

    def wait(self, seconds: float) -> None:
        self._idle = True
        if self._outputs:
            time.sleep(min(max(self._outputs[0][0] - time.monotonic(), 0.0), seconds))


class Simulation:
    """Manager over a simulated worker, in this process and thread."""

    def __init__(
        self, info: EngineInfo, lives: LengthSampler, pieces: Sequence[bytes] | None = None, step_seconds: float = 0.0
    ) -> None:
        self.ports = SimulatedPorts(SimulatedWorker(info, lives), step_seconds)
        self.manager = Manager(EngineConfig(model="simulated"), info, self.ports, pieces)

    def submit(self, message: msgspec.Struct) -> None:
        """Send a Submit or a Cancel."""
        self.ports.submit(encode(message))

    def turn(self) -> float:
        """Run one turn of the manager's loop, then the worker's; return the manager's CPU seconds in this thread."""
        began = time.thread_time()
        active = self.manager.turn()
        spent = time.thread_time() - began
        self.ports.work()
        if not active:
            self.ports.wait(1.0)
        return spent


def _uniform(seed: Int64, sample: NDArray[np.int32]) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each pair, by SplitMix64."""
    z = (seed.astype(np.uint64) << np.uint64(20)) + sample.astype(np.uint64) + np.uint64(1)
    mixed = split_mix(z * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(11)
    return mixed / float(1 << 53)


def endless_lengths(u: NDArray[np.float64]) -> Int64:
    """Return lengths that no sample reaches."""
    return np.full(len(u), 1 << 40)
