"""Runner: one step, from its StepInput to its StepOutput, without waiting for the device in between."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tok_core.config import MOST_AHEAD
from tok_core.messages import StepInput, StepOutput
from tok_core.model.decoder import CausalLM
from tok_core.worker import rows
from tok_core.worker.draw import draw, extras
from tok_core.worker.graphs import DecodeGraphs
from tok_core.worker.staging import Outbox, Staging
from tok_core.worker.state import WorkerState, changes
from tok_kernels import Backend

if TYPE_CHECKING:
    from tok_core.worker.trace import Tracer


class Mark:
    """A moment on the device, or where there is none beside the host, on the host."""

    def __init__(self, device: torch.device) -> None:
        self.event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self.event.record()
        self.time = time.perf_counter()

    def wait(self) -> None:
        """Blocks until the device has come here."""
        if self.event is not None:
            self.event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        """Time between two marks that the device has passed."""
        if self.event is None or earlier.event is None:
            return self.time - earlier.time
        return float(earlier.event.elapsed_time(self.event)) / 1e3


@dataclass(frozen=True, slots=True)
class Launched:
    """A step on its way: `output` waits until its tokens are on the host."""

    step: int
    launch_seconds: float
    began: Mark
    done: Mark
    draws: Tensor
    rows: int
    top_token: Tensor
    top_logprob: Tensor

    def output(self) -> StepOutput:
        """The step's tokens; blocks until the device has computed them."""
        self.done.wait()
        token, logprob = self.draws[:, : self.rows].clone()
        return StepOutput(
            step=self.step,
            token=token.numpy(),
            logprob=logprob.view(torch.float32).numpy(),
            top_token=self.top_token.numpy(),
            top_logprob=self.top_logprob.numpy(),
            launch_seconds=self.launch_seconds,
            device_seconds=self.done.seconds_since(self.began),
        )


class Runner:
    """Launches steps in order. Each finds the tokens of the one before on the device.

    Decode steps replay a CUDA graph where one of their size was captured; all others are launched kernel by kernel.
    At most MOST_AHEAD may be on their way. A `tracer` hears of every step.
    """

    def __init__(self, model: CausalLM, backend: Backend, state: WorkerState, tracer: Tracer | None = None) -> None:
        self.model = model
        self.backend = backend
        self.state = state
        self.staging = Staging(state.device, MOST_AHEAD)
        self.outbox = Outbox(state.device, MOST_AHEAD, state.slots + 1)
        self.mirror = rows.Mirror(state.slots + 1) if backend.needs_host_lengths else None
        self.graphs = DecodeGraphs(model, backend, state, self.staging)
        self._tracer = tracer

    @property
    def max_len(self) -> int:
        """Positions that a sequence may have: those of a slot's page table that the model has angles for."""
        return min(self.state.max_len, self.model.config.max_positions)

    @torch.inference_mode()
    def launch(self, step: StepInput) -> Launched:
        """Enqueues the whole step on the device."""
        if self._tracer is not None:
            self._tracer.before(step.step)
        time_began = time.perf_counter()
        graph = self.graphs.find(step)
        arrays = rows.arrays(step) if graph is None else graph.arrays(step)
        put = self.staging.put({**arrays, **changes(step), **extras(step)})
        began = Mark(self.state.device)  # not before: on an idle device the host's time would be taken for its own
        self.state.apply(step, put)
        kv_len = None if self.mirror is None else self.mirror.follow(step)
        if graph is not None and not graph.draws(step):
            graph.forward.replay()
            draws, top = self._draw(step, put, graph.hidden[: len(step.decode_slot)])
        elif graph is not None:
            graph.forward.replay()
            graph.draw.replay()
            draws, top = graph.drawn, NO_TOP
        else:
            made = rows.rows(self.backend, self.state, step, put, kv_len)
            hidden = self.model(
                *(made.token_T, made.position_T, made.kv_index_T, self.state.caches, made.batch, made.logit_row_R)
            )
            draws, top = self._draw(step, put, hidden)
        return self._send(step, time_began, began, draws, top)

    def forget(self) -> None:
        """Forgets all sequences, as if no step had been carried out."""
        self.state.reset()
        if self.mirror is not None:
            self.mirror.reset()

    def _draw(self, step: StepInput, put: dict[str, Tensor], hidden_RN: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        sampled = draw(self.backend, self.state, step, put, self.model.logits(hidden_RN))
        draws = self.backend.record_draws(put["sample_slot"], sampled.token, sampled.logprob, self.state.columns)
        return draws, (sampled.top_token.int(), sampled.top_logprob)

    def _send(
        self, step: StepInput, time_began: float, began: Mark, draws: Tensor, top: tuple[Tensor, Tensor]
    ) -> Launched:
        host = self.outbox.send(draws)
        if step.top_logprobs:
            top_token, top_logprob = (_page_locked(x) for x in top)
        else:
            top_token, top_logprob = (x.new_empty((len(step.sample_slot), 0), device="cpu") for x in NO_TOP)
        done = Mark(self.state.device)
        return Launched(
            step=step.step,
            launch_seconds=time.perf_counter() - time_began,
            began=began,
            done=done,
            draws=host,
            rows=len(step.sample_slot),
            top_token=top_token,
            top_logprob=top_logprob,
        )


NO_TOP = (torch.empty((0, 0), dtype=torch.int32), torch.empty((0, 0), dtype=torch.float32))


def _page_locked(x: Tensor) -> Tensor:
    """The tensor on its way to the host."""
    if x.device.type != "cuda":
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
