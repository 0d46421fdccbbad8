"""Run a worker's steps, from StepInput to StepOutput, without waiting for the device in between."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tok_core.config import MAX_STEPS_AHEAD, RankCoordinates
from tok_core.messages import MemoryTask, PromptValues, RebalanceExperts, StepInput, StepOutput, TaskResult, WorkerTask
from tok_core.model_config import short_prompt
from tok_core.models import CausalLM, ExpertLoad, rebalance
from tok_core.parallel import PendingTokens, Pipeline
from tok_core.runtime import HEARTBEAT
from tok_core.worker import prompt_values, step_tensors
from tok_core.worker.cuda_graphs import NO_SAMPLED_TOKENS, DecodeGraph, DecodeGraphs
from tok_core.worker.draft_model import DraftModelRunner
from tok_core.worker.launch_watch import LaunchWatch
from tok_core.worker.sampling import sample_tokens, sampling_arrays
from tok_core.worker.sleep import SleepingMemory
from tok_core.worker.staging import OutputStaging, Staging
from tok_core.worker.state import WorkerState, changes
from tok_core.worker.transfer import WeightReceiver
from tok_core.worker.weights import FillModel, change_weights
from tok_kernels import Backend
from tok_kernels.compilation import kernel_builds

if TYPE_CHECKING:
    from tok_core.worker.trace import Tracer


class TimingEvent:
    """Point in time: a CUDA event in the device's order of work, or the host's clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self.event.record()
        self.time = time.perf_counter()

    def wait(self) -> None:
        """Block until the device has reached this point."""
        if self.event is not None:
            self.event.synchronize()

    def seconds_since(self, earlier: TimingEvent) -> float:
        """Return the time between two points that the device has passed."""
        if self.event is None or earlier.event is None:
            return self.time - earlier.time
        return float(earlier.event.elapsed_time(self.event)) / 1e3


NO_DRAFTS = torch.empty((0, 0), dtype=torch.int32)


@dataclass(frozen=True, slots=True)
class Launched:
    """Launched step; `output` waits until it is done and, at the last stage, its tokens are on the host.

    drafted  when the draft model had drafted `draft_token`; None: it drafted nothing
    """

    step: int
    launch_seconds: float
    began: TimingEvent
    done: TimingEvent
    sampled_tokens: Tensor
    rows: int
    top_token: Tensor
    top_logprob: Tensor
    prompts: prompt_values.PromptOutputs | None
    expert_tokens: Tensor | None = None
    draft_token: Tensor = NO_DRAFTS
    drafted: TimingEvent | None = None
    capture_seconds: float = 0.0
    missing_graphs: int = 0

    def output(self) -> StepOutput:
        """Return the step's tokens, which only the last stage has; block until the device has finished the step."""
        self.done.wait()
        token, logprob = self.sampled_tokens[:, : self.rows].clone()
        return StepOutput(
            step=self.step,
            token=token.numpy(),
            logprob=logprob.view(torch.float32).numpy(),
            top_token=self.top_token.numpy(),
            top_logprob=self.top_logprob.numpy(),
            launch_seconds=self.launch_seconds,
            device_seconds=self.done.seconds_since(self.began),
            prompts=None if self.prompts is None else PromptValues(*(one.numpy() for one in self.prompts)),
            expert_tokens=None if self.expert_tokens is None else self.expert_tokens.numpy(),
            draft_token=self.draft_token.numpy(),
            draft_seconds=0.0 if self.drafted is None else self.drafted.seconds_since(self.began),
            capture_seconds=self.capture_seconds,
            missing_graphs=self.missing_graphs,
        )


class Runner:
    """Launcher of steps in order; each step reads the sampled tokens of earlier ones on the device.

    Decode steps replay a CUDA graph if one of their size was captured; all others are launched kernel by kernel.
    At most MAX_STEPS_AHEAD steps may be in flight. A `tracer` is called before every step; `pipeline` connects the
    worker to the neighbouring stages, if there are any. `start_weights` fills the model as at the start; without it the
    weights cannot be changed. `memory` holds weights and KV cache of an engine that may sleep. `prefix_groups`: decode
    rows may be grouped by shared prefix. `draft_model` drafts tokens at the start of steps that say so.
    """

    def __init__(
        self,
        model: CausalLM,
        backend: Backend,
        state: WorkerState,
        tracer: Tracer | None = None,
        pipeline: Pipeline | None = None,
        start_weights: FillModel | None = None,
        memory: SleepingMemory | None = None,
        *,
        prefix_groups: bool = True,
        draft_model: DraftModelRunner | None = None,
    ) -> None:
        self.prefix_groups = prefix_groups
        self.draft_model = draft_model
        self.model = model
        self.backend = backend
        self.state = state
        self.pipeline = pipeline = Pipeline.alone(state.device) if pipeline is None else pipeline
        self.staging = Staging(state.device, MAX_STEPS_AHEAD)
        self.output_staging = OutputStaging(state.device, MAX_STEPS_AHEAD, state.slots + 1)
        self.host_lengths = step_tensors.HostLengthTracker(state.slots + 1) if backend.needs_host_lengths else None
        self._reader = None if draft_model is None else draft_model.reader
        self.graphs = DecodeGraphs(
            *(model, backend, state, self.staging, pipeline.coordinates),
            prefix_groups=prefix_groups,
            reader=self._reader,
        )
        self._expert_load = ExpertLoad(model) if _counts_experts(model, pipeline.coordinates) else None
        self._short_prompt = short_prompt(model.config.rope_scaling, self.max_len)
        self._tracer = tracer
        self._start_weights = start_weights
        self._receiver = WeightReceiver(model, pipeline.coordinates.number)
        self._memory = memory
        self._watch = LaunchWatch(kernel_builds() if state.device.type == "cuda" else ())

    @property
    def max_len(self) -> int:
        """Return the longest sequence in positions, as limited by a slot's page table and by the rotary table."""
        return min(self.state.max_len, self.model.config.max_positions)

    @torch.inference_mode()
    def launch(self, step: StepInput) -> Launched:
        """Enqueue the whole step on the device."""
        HEARTBEAT.turned()  # startup launches steps to measure and to warm up
        if self._tracer is not None:
            self._tracer.before(step.step)
        graph = self.graphs.find(step)
        self._watch.begin()
        time_began = time.perf_counter()
        coordinates, pending_tokens = self.pipeline.coordinates, self.pipeline.pending_tokens(step)
        arrays = step_tensors.arrays(step) if graph is None else graph.arrays(step)
        output_arrays = sampling_arrays(step) | prompt_values.arrays(step) if coordinates.last else {}
        drafts = self._draft_arrays(step)
        put = self.staging.put({**arrays, **changes(step), **output_arrays, **_pending_slots(pending_tokens), **drafts})
        if pending_tokens:
            self._record_pending(pending_tokens, put)
        began = TimingEvent(self.state.device)  # not earlier: an idle device would count the host's time as its own
        self.state.apply(step, put)
        stream = None
        if not coordinates.first:
            stream = self._receive(step, graph)
            began = TimingEvent(self.state.device)  # excludes the wait for the stage before
        draft_token, drafted = self._draft(step, put)
        hidden = self._compute(step, put, graph, stream)
        prompt_outputs = None
        if coordinates.last:
            sampling_hidden = hidden if step.prompts is None else hidden[put["logit_row"].long()]
            sampled_tokens, top = self._sample(step, put, graph, sampling_hidden)
            self.pipeline.send_tokens(sampled_tokens[0, : len(step.sample_slot)])
            if step.prompts is not None:
                prompt_outputs = prompt_values.compute(self.model, put, step.prompts, hidden)
        else:
            sampled_tokens, top = NO_SAMPLED_TOKENS, NO_TOP
            self.pipeline.send(hidden)
            self.pipeline.expect(step)
        launched = self._send(step, time_began, began, sampled_tokens, top, prompt_outputs)
        launched = replace(
            launched,
            draft_token=draft_token,
            drafted=drafted,
            capture_seconds=self.graphs.take_capture_seconds(),
            missing_graphs=self.graphs.missing,
        )
        self._watch.end(step.step, launched.launch_seconds, graph=graph is not None)
        return launched

    def reset(self) -> None:
        """Reset to the state before the first step: no slot has a sequence."""
        self.pipeline.reset()
        self.state.reset()
        self._watch.reset()
        if self.host_lengths is not None:
            self.host_lengths.reset()

    def execute(self, task: WorkerTask) -> TaskResult:
        """Change the weights, or release or restore memory, while no step is in flight."""
        if isinstance(task, MemoryTask):
            assert self._memory is not None
            return self._memory.execute(task, self.graphs)
        if isinstance(task, RebalanceExperts):
            if not self._receiver.is_staging:  # staged tensors are those of this rank's experts
                rebalance(self.model, self._expert_load)
            return TaskResult()
        assert self._start_weights is not None
        return change_weights(task, self.model, self.graphs, self._start_weights, self._receiver)

    def _record_pending(self, pending_tokens: list[PendingTokens], put: dict[str, Tensor]) -> None:
        """Wait for the sampled tokens of earlier steps, and record them in their slots."""
        for pending in pending_tokens:
            pending.work.wait()
        token = pending_tokens[0].token
        if len(pending_tokens) > 1:
            token = torch.cat([pending.token for pending in pending_tokens])
        no_logprob = torch.empty(len(token), dtype=torch.float32, device=self.state.device)
        self.backend.record_sampled_tokens(put["pending_slot"], token.long(), no_logprob, self.state.columns)

    def _draft_arrays(self, step: StepInput) -> dict[str, np.ndarray]:
        if step.drafts is None:
            return {}
        assert self.draft_model is not None
        return self.draft_model.arrays(step.drafts)

    def _draft(self, step: StepInput, put: dict[str, Tensor]) -> tuple[Tensor, TimingEvent | None]:
        """Let the draft model draft; return its tokens, and when it was done."""
        if step.drafts is None:
            return NO_DRAFTS, None
        assert self.draft_model is not None
        token = _page_locked(self.draft_model.draft(step.drafts, put, step.max_kv))
        return token, TimingEvent(self.state.device)

    def _receive(self, step: StepInput, graph: DecodeGraph | None) -> Tensor:
        """Receive the residual stream of the stage before, in the graph's input if there is a graph."""
        if graph is not None and graph.stage_input is not None:
            return self.pipeline.receive(len(graph.stage_input), graph.stage_input)
        return self.pipeline.receive(self.model.stream_rows(len(step.decode_slot) + len(step.prefill_token)))

    def _compute(
        self, step: StepInput, put: dict[str, Tensor], graph: DecodeGraph | None, stream: Tensor | None
    ) -> Tensor:
        """Run this stage's layers on the step's tokens, or on the received residual stream."""
        kv_len = None if self.host_lengths is None else self.host_lengths.follow(step)
        if graph is not None:
            graph.forward.replay()
            return graph.hidden
        tensors = step_tensors.rows(self.backend, self.state, step, put, kv_len)
        x_T = tensors.token_T if stream is None else stream
        logit_row_R = tensors.logit_row_R if step.prompts is None else None  # prompt outputs need all rows
        pass_length_T = None
        if self._short_prompt is not None and len(step.prefill_slot):
            pass_length_T = step_tensors.pass_lengths(self.state, step, put, tensors.position_T)
        with nullcontext() if self._expert_load is None else self._expert_load.counting():
            hidden: Tensor = self.model(
                *(x_T, tensors.position_T, tensors.kv_index_T, self.state.caches, tensors.batch),
                *(logit_row_R, pass_length_T),
                reader=self._reader,
            )
        return hidden

    def _sample(
        self, step: StepInput, put: dict[str, Tensor], graph: DecodeGraph | None, hidden: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Sample: return tokens and their log-probabilities' bits, int32 `[2, ≥ R]`, and the top tokens."""
        if graph is not None and graph.sample_graph is not None and graph.can_sample(step):
            graph.sample_graph.replay()
            return graph.sampled_tokens, NO_TOP
        hidden_RN = hidden if graph is None else hidden[: len(step.decode_slot)]
        sampled = sample_tokens(self.backend, self.state, step, put, self.model.logits(hidden_RN), self.model.shards)
        sampled_tokens = self.backend.record_sampled_tokens(
            put["sample_slot"], sampled.token, sampled.logprob, self.state.columns
        )
        return sampled_tokens, (sampled.top_token.int(), sampled.top_logprob)

    def _send(
        self,
        step: StepInput,
        time_began: float,
        began: TimingEvent,
        sampled_tokens: Tensor,
        top: tuple[Tensor, Tensor],
        prompt_outputs: prompt_values.PromptOutputs | None,
    ) -> Launched:
        sampled_count = len(step.sample_slot) if self.pipeline.coordinates.last else 0
        host = self.output_staging.send(sampled_tokens)
        if sampled_count and step.top_logprobs:
            top_token, top_logprob = (_page_locked(x) for x in top)
        else:
            top_token, top_logprob = (x.new_empty((sampled_count, 0), device="cpu") for x in NO_TOP)
        prompts = None if prompt_outputs is None else prompt_values.PromptOutputs(*map(_page_locked, prompt_outputs))
        expert_tokens = None if self._expert_load is None else self._expert_load.take()
        expert_tokens = None if expert_tokens is None else _page_locked(expert_tokens)
        done = TimingEvent(self.state.device)
        return Launched(
            step=step.step,
            launch_seconds=time.perf_counter() - time_began,
            began=began,
            done=done,
            sampled_tokens=host,
            rows=sampled_count,
            top_token=top_token,
            top_logprob=top_logprob,
            prompts=prompts,
            expert_tokens=expert_tokens,
        )


NO_TOP = (torch.empty((0, 0), dtype=torch.int32), torch.empty((0, 0), dtype=torch.float32))


def _counts_experts(model: CausalLM, coordinates: RankCoordinates) -> bool:
    """Return whether a worker counts tokens of experts: for statistics, or as the first of its stage for placements."""
    return model.config.moe is not None and (
        coordinates.returns or (coordinates.rank == 0 and coordinates.redundant_experts > 0)
    )


def _pending_slots(pending_tokens: list[PendingTokens]) -> dict[str, np.ndarray]:
    return {"pending_slot": np.concatenate([one.slot for one in pending_tokens])} if pending_tokens else {}


def _page_locked(x: Tensor) -> Tensor:
    """Enqueue a copy of the tensor into page-locked host memory, and return the copy."""
    if x.device.type != "cuda":
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
