"""Launch a worker's steps in order, from StepInput to StepOutput, without waiting for the device in between.

The worker's main thread calls `Runner.launch` for each step. Another thread calls `LaunchedStep.output`, which waits
until the device has finished the step. Steps in flight depend on each other on the device only: a decode row reads the
token that the step before has sampled into its slot.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tok_core.config import MAX_STEPS_AHEAD, RankCoordinates
from tok_core.messages import MemoryTask, PromptValues, RebalanceExperts, StepInput, StepOutput, TaskResult, WorkerTask
from tok_core.model_config import short_prompt
from tok_core.models import CausalLM, ExpertLoad, rebalance
from tok_core.parallel import PendingTokens, Pipeline
from tok_core.runtime import HEARTBEAT
from tok_core.worker.cuda_graphs import NO_SAMPLED_TOKENS, DecodeGraph, DecodeGraphs
from tok_core.worker.draft_model import DraftModelRunner
from tok_core.worker.launch_watch import LaunchWatch
from tok_core.worker.ngram_drafts import DraftOutputs, NgramDrafter, draft_arrays
from tok_core.worker.prompt_outputs import PromptOutputs, compute_prompt_outputs, prompt_output_arrays
from tok_core.worker.sampling import sample_tokens, sampling_arrays
from tok_core.worker.sleep import SleepingMemory
from tok_core.worker.staging import STAGING_BYTES, OutputStaging, Staging, copy_to_host
from tok_core.worker.state import WorkerState, state_changes
from tok_core.worker.step_tensors import HostLengthTracker, build_step_tensors, pass_lengths, step_arrays
from tok_core.worker.transfer import WeightReceiver
from tok_core.worker.weights import FillModel, change_weights
from tok_kernels import Backend, DraftRows
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

    def is_reached(self) -> bool:
        """Return whether the device has reached this point."""
        return self.event is None or self.event.query()  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Block until the device has reached this point."""
        if self.event is not None:
            self.event.synchronize()

    def seconds_since(self, earlier: TimingEvent) -> float:
        """Return the time between two points that the device has passed."""
        if self.event is None or earlier.event is None:
            return self.time - earlier.time
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class SampledTokens(NamedTuple):
    """Tokens that a step has sampled; empty on a pipeline stage that is not the last.

    tokens       int32 `[2, ≥ R]`: tokens, and the bits of their log-probabilities
    top_token    int32 `[R, K]`: the most likely tokens, if the step requests any
    top_logprob  float32 `[R, K]`: their log-probabilities
    """

    tokens: Tensor
    top_token: Tensor
    top_logprob: Tensor


NO_TOP_TOKENS = torch.empty((0, 0), dtype=torch.int32), torch.empty((0, 0), dtype=torch.float32)
NO_SAMPLES = SampledTokens(NO_SAMPLED_TOKENS, *NO_TOP_TOKENS)
NO_DRAFTS = torch.empty((0, 0), dtype=torch.int32)

STAGING_BYTES_PER_SLOT = 160  # the arrays of a CUDA graph have up to 142 bytes a row, and must fit


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """Step that is enqueued on the device. Its tensors are on the host, and valid once the device has passed `done`.

    step, launch_seconds, capture_seconds, missing_graphs  see StepOutput
    samples        sampled tokens; only the first `sampled_rows` columns of `samples.tokens` count
    prompts        prompt outputs; None: the step has none
    expert_tokens  tokens of each expert; None: not counted
    slot_expert    see StepOutput
    draft_token    tokens of the draft model
    draft_outputs  of NgramDrafter; None: there is none
    began, done    the device's first and last operation of the step
    drafted        when the draft model was done; None: the step has no drafts
    """

    step: int
    samples: SampledTokens
    sampled_rows: int
    prompts: PromptOutputs | None
    expert_tokens: Tensor | None
    slot_expert: np.ndarray | None
    draft_token: Tensor
    draft_outputs: DraftOutputs | None
    began: TimingEvent
    drafted: TimingEvent | None
    done: TimingEvent
    launch_seconds: float
    capture_seconds: float
    missing_graphs: int

    def output(self) -> StepOutput:
        """Block until the device has finished the step, and return its output; only the last stage has tokens."""
        self.done.wait()
        token, logprob = self.samples.tokens[:, : self.sampled_rows].clone()
        output = StepOutput(
            step=self.step,
            token=token.numpy(),
            logprob=logprob.view(torch.float32).numpy(),
            top_token=self.samples.top_token.numpy(),
            top_logprob=self.samples.top_logprob.numpy(),
            launch_seconds=self.launch_seconds,
            device_seconds=self.done.seconds_since(self.began),
            prompts=None if self.prompts is None else PromptValues(*(values.numpy() for values in self.prompts)),
            expert_tokens=None if self.expert_tokens is None else self.expert_tokens.numpy(),
            slot_expert=self.slot_expert,
            draft_token=self.draft_token.numpy(),
            draft_seconds=0.0 if self.drafted is None else self.drafted.seconds_since(self.began),
            capture_seconds=self.capture_seconds,
            missing_graphs=self.missing_graphs,
        )
        if self.draft_outputs is not None:
            self.draft_outputs.fill(output)
        return output


class Runner:
    """Launcher of a worker's steps.

    Decode steps replay a CUDA graph if one of their size was captured; all others are launched kernel by kernel.
    At most MAX_STEPS_AHEAD steps may be in flight.

    tracer         called before every step; None: no step is traced
    pipeline       connects the worker to the neighbouring stages; None: the worker has all layers
    start_weights  fills the model as at the start; None: the weights cannot be changed
    memory         memory of weights and KV cache; None: the engine cannot sleep
    prefix_groups  whether decode rows may be grouped by shared prefix
    draft_model    drafts tokens at the start of steps that say so; None: there is no draft model
    max_pack_rows  maximum rows of a pack (`AttentionBatch.packs`); 1: there are no packs
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
        max_pack_rows: int = 1,
    ) -> None:
        self.model = model
        self.backend = backend
        self.state = state
        self.prefix_groups = prefix_groups
        self.draft_model = draft_model
        self.pipeline = pipeline = Pipeline.alone(state.device) if pipeline is None else pipeline
        self.staging = Staging(state.device, MAX_STEPS_AHEAD, STAGING_BYTES + STAGING_BYTES_PER_SLOT * state.slots)
        self.output_staging = OutputStaging(state.device, MAX_STEPS_AHEAD, state.slots + 1)
        self.host_lengths = HostLengthTracker(state.slots + 1) if backend.needs_host_lengths else None
        self._ngram_drafter = None if state.ngrams is None else NgramDrafter(backend, state)
        self.max_pack_rows = max_pack_rows
        self._reader = None if draft_model is None else draft_model.reader
        self.graphs = DecodeGraphs(
            *(model, backend, state, self.staging, pipeline.coordinates),
            prefix_groups=prefix_groups,
            max_pack_rows=max_pack_rows,
            drafter=self._ngram_drafter,
            reader=self._reader,
        )
        self._expert_load = ExpertLoad(model) if _counts_experts(model, pipeline.coordinates) else None
        self._short_prompt = short_prompt(model.config.rope_scaling, self.max_len)
        self._tracer = tracer
        self._start_weights = start_weights
        self._receiver = WeightReceiver(model, pipeline.coordinates.number)
        self._memory = memory
        self._last_done: TimingEvent | None = None  # when the last launched step is done
        self._watch = LaunchWatch(kernel_builds() if state.device.type == "cuda" else ())

    @property
    def max_len(self) -> int:
        """Return the length of the longest sequence, as limited by a slot's page table and by the RoPE table."""
        return min(self.state.max_len, self.model.config.max_positions)

    @property
    def is_idle(self) -> bool:
        """Return whether the device has finished all launched steps."""
        return self._last_done is None or self._last_done.is_reached()

    @torch.inference_mode()
    def launch(self, step: StepInput) -> LaunchedStep:
        """Enqueue a whole step on the device, in the order that StepInput describes, and return without waiting."""
        HEARTBEAT.turned()  # the start launches steps, too
        if self._tracer is not None:
            self._tracer.before(step.step)
        graph = self.graphs.find(step)
        self._watch.begin()
        launch_start = time.perf_counter()
        last_stage = self.pipeline.coordinates.last

        # Apply what has changed since the last step.
        pending_tokens = self.pipeline.pending_tokens(step)
        staged = self._stage(step, graph, pending_tokens)
        if pending_tokens:
            self._record_pending(pending_tokens, staged)
        began = TimingEvent(self.state.device)  # not earlier: an idle device would count the host's time as its own
        self.state.apply(step, staged)
        stream = None
        if not self.pipeline.coordinates.first:
            stream = self._receive_stream(step, graph)
            began = TimingEvent(self.state.device)  # excludes the wait for the stage before

        # Draft, run the layers, and sample or pass the residual stream on.
        draft_token, drafted = self._draft_with_model(step, staged)
        draft_kn = self._draft_by_ngrams(step, staged, graph)
        hidden = self._forward(step, staged, graph, stream)
        if last_stage:
            samples, prompts = self._sample(step, staged, graph, hidden)
        else:
            samples, prompts = NO_SAMPLES, None
            self.pipeline.send(hidden)
            self.pipeline.expect(step)
        draft_outputs = self._advance(step, staged, graph, draft_kn)

        # Copy the outputs to the host.
        sampled_rows = len(step.sample_slot) if last_stage else 0
        samples = self._copy_samples(step, samples, sampled_rows)
        prompts = None if prompts is None else PromptOutputs(*map(copy_to_host, prompts))
        expert_tokens, slot_expert = None, None
        if self._expert_load is not None and (count_LS := self._expert_load.take()) is not None:
            expert_tokens, slot_expert = copy_to_host(count_LS), self._expert_load.slot_expert()
        self._last_done = done = TimingEvent(self.state.device)
        launch_seconds = time.perf_counter() - launch_start
        self._watch.end(step.step, launch_seconds, graph=graph is not None)
        return LaunchedStep(
            step=step.step,
            samples=samples,
            sampled_rows=sampled_rows,
            prompts=prompts,
            expert_tokens=expert_tokens,
            slot_expert=slot_expert,
            draft_token=draft_token,
            draft_outputs=draft_outputs,
            began=began,
            drafted=drafted,
            done=done,
            launch_seconds=launch_seconds,
            capture_seconds=self.graphs.take_capture_seconds(),
            missing_graphs=self.graphs.missing,
        )

    def reset(self) -> None:
        """Reset to the state before the first step: no slot has a sequence."""
        self.pipeline.reset()
        self.state.reset()
        if self._ngram_drafter is not None:
            self._ngram_drafter.reset()
        self._watch.reset()
        if self.host_lengths is not None:
            self.host_lengths.reset()

    def execute(self, task: WorkerTask) -> TaskResult:
        """Change the weights, move experts, or release or restore memory, while no step is in flight."""
        if isinstance(task, MemoryTask):
            assert self._memory is not None
            return self._memory.execute(task, self.graphs.suspend)
        if isinstance(task, RebalanceExperts):
            rebalance(self.model, self._expert_load)
            return TaskResult()
        assert self._start_weights is not None
        return change_weights(task, self.model, self.graphs, self._start_weights, self._receiver)

    def _stage(
        self, step: StepInput, graph: DecodeGraph | None, pending_tokens: list[PendingTokens]
    ) -> dict[str, Tensor]:
        """Copy all host arrays of a step to the device at once; return them by name."""
        # A graph reads its arrays at fixed addresses, which the first arrays get.
        arrays = step_arrays(step, self.max_pack_rows) if graph is None else graph.arrays(step)
        arrays |= state_changes(step)
        if self.pipeline.coordinates.last:
            arrays |= sampling_arrays(step) | prompt_output_arrays(step)
        if self._ngram_drafter is not None:
            biased = self.state.biases.token.numel() > 0
            arrays |= draft_arrays(step, graph=graph is not None, biased=biased)
        if pending_tokens:
            arrays["pending_slot"] = np.concatenate([pending.slot for pending in pending_tokens])
        if step.drafts is not None:
            assert self.draft_model is not None
            arrays |= self.draft_model.host_arrays(step.drafts)
        return self.staging.put(arrays)

    def _record_pending(self, pending_tokens: list[PendingTokens], staged: dict[str, Tensor]) -> None:
        """Wait for the tokens that the last stage has sampled in earlier steps, and record them in their slots."""
        for pending in pending_tokens:
            pending.work.wait()
        token = pending_tokens[0].token
        if len(pending_tokens) > 1:
            token = torch.cat([pending.token for pending in pending_tokens])
        no_logprob = torch.empty(len(token), dtype=torch.float32, device=self.state.device)
        self.backend.record_sampled_tokens(staged["pending_slot"], token.long(), no_logprob, self.state.columns)

    def _receive_stream(self, step: StepInput, graph: DecodeGraph | None) -> Tensor:
        """Receive the residual stream of the stage before, in the graph's input if there is a graph."""
        if graph is not None and graph.stage_input is not None:
            return self.pipeline.receive(len(graph.stage_input), graph.stage_input)
        return self.pipeline.receive(self.model.stream_rows(len(step.decode_slot) + len(step.prefill_token)))

    def _draft_with_model(self, step: StepInput, staged: dict[str, Tensor]) -> tuple[Tensor, TimingEvent | None]:
        """Let the draft model draft; return its tokens on the host, and when it was done."""
        if step.drafts is None:
            return NO_DRAFTS, None
        assert self.draft_model is not None
        token = copy_to_host(self.draft_model.draft(step.drafts, staged, step.max_kv))
        return token, TimingEvent(self.state.device)

    def _draft_by_ngrams(self, step: StepInput, staged: dict[str, Tensor], graph: DecodeGraph | None) -> Tensor | None:
        """Draft the tokens of the step's `verify_rows`, unless its graph does; return them, int64 `[k, n]`, or None."""
        if step.verify_rows is None:
            return None
        assert self._ngram_drafter is not None
        self._ngram_drafter.copy_biases(staged)
        return None if graph is not None else self._ngram_drafter.draft(DraftRows(*staged["drafts"]))

    def _advance(
        self, step: StepInput, staged: dict[str, Tensor], graph: DecodeGraph | None, draft_kn: Tensor | None
    ) -> DraftOutputs | None:
        """Advance sequences past accepted drafts, and learn the step's tokens."""
        if self._ngram_drafter is None:
            return None
        if graph is not None and graph.advance_graph is not None:
            graph.advance_graph.replay()
            return self._ngram_drafter.finish(step, staged, graph.advanced, graph.key.max_sequences)
        drafts = None if draft_kn is None else DraftRows(*staged["drafts"])
        advanced = self._ngram_drafter.advance(staged["slots"][: len(step.decode_slot)], drafts, draft_kn)
        return self._ngram_drafter.finish(step, staged, advanced, 0 if draft_kn is None else draft_kn.shape[1])

    def _forward(
        self, step: StepInput, staged: dict[str, Tensor], graph: DecodeGraph | None, stream: Tensor | None
    ) -> Tensor:
        """Run this stage's layers on the step's tokens, or on the received residual stream.

        Return the hidden states of the rows that sample, or of all rows if the step has prompt outputs; with a graph,
        they are followed by padding rows. Stages other than the last return their residual stream.
        """
        kv_len = None if self.host_lengths is None else self.host_lengths.advance(step)
        if graph is not None:
            graph.forward.replay()
            return graph.hidden
        tensors = build_step_tensors(self.backend, self.state, step, staged, kv_len)
        x_T = tensors.token_T if stream is None else stream
        logit_row_R = tensors.logit_row_R if step.prompts is None else None  # prompt outputs need all rows
        pass_length_T = None
        if self._short_prompt is not None and len(step.prefill_slot):
            pass_length_T = pass_lengths(self.state, step, staged, tensors.position_T)
        with nullcontext() if self._expert_load is None else self._expert_load.counting():
            hidden: Tensor = self.model(
                *(x_T, tensors.position_T, tensors.kv_index_T, self.state.caches, tensors.batch),
                *(logit_row_R, pass_length_T),
                reader=self._reader,
            )
        return hidden

    def _sample(
        self, step: StepInput, staged: dict[str, Tensor], graph: DecodeGraph | None, hidden: Tensor
    ) -> tuple[SampledTokens, PromptOutputs | None]:
        """Sample the step's tokens, send them to the other stages, and compute the prompt outputs."""
        if graph is not None and graph.sample_graph is not None and graph.can_sample(step):
            graph.sample_graph.replay()
            samples = SampledTokens(graph.sampled_tokens, *NO_TOP_TOKENS)
        else:
            samples = self._sample_eagerly(step, staged, graph, hidden)
        self.pipeline.send_tokens(samples.tokens[0, : len(step.sample_slot)])
        if step.prompts is None:
            return samples, None
        return samples, compute_prompt_outputs(self.model, staged, step.prompts, hidden)

    def _sample_eagerly(
        self, step: StepInput, staged: dict[str, Tensor], graph: DecodeGraph | None, hidden: Tensor
    ) -> SampledTokens:
        """Sample the step's tokens kernel by kernel, and record them in their slots."""
        if step.prompts is not None:
            hidden = hidden[staged["logit_row"].long()]
        elif graph is not None:
            hidden = hidden[: len(step.decode_slot)]  # without padding rows
        sampled = sample_tokens(self.model, self.backend, self.state, step, staged, hidden)
        tokens = self.backend.record_sampled_tokens(
            staged["sample_slot"], sampled.token, sampled.logprob, self.state.columns
        )
        return SampledTokens(tokens, sampled.top_token.int(), sampled.top_logprob)

    def _copy_samples(self, step: StepInput, samples: SampledTokens, sampled_rows: int) -> SampledTokens:
        """Enqueue the copy of sampled tokens to the host."""
        tokens = self.output_staging.copy_to_host(samples.tokens)
        if sampled_rows and step.top_logprobs:
            return SampledTokens(tokens, copy_to_host(samples.top_token), copy_to_host(samples.top_logprob))
        return SampledTokens(tokens, *(empty.new_empty((sampled_rows, 0)) for empty in NO_TOP_TOKENS))


def _counts_experts(model: CausalLM, coordinates: RankCoordinates) -> bool:
    """Return whether a worker counts the tokens of experts.

    A worker that returns outputs counts them for statistics; rank 0 of a stage with redundant experts counts them to
    place the experts.
    """
    return model.config.moe is not None and (
        coordinates.returns or (coordinates.rank == 0 and coordinates.redundant_experts > 0)
    )
