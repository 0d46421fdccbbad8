"""Set up a worker from an EngineConfig: resolve its settings, load the model, size the KV cache, warm up.

`set_up` runs once in each worker process, before its first step; docs/architecture.md lists what it does in order.
"""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tok_core.config import EngineConfig, RankCoordinates, all_coordinates
from tok_core.errors import EngineError
from tok_core.messages import EngineInfo, Rendezvous
from tok_core.model_config import ModelConfig, rope_depends_on_length, short_prompt
from tok_core.models import CausalLM, build
from tok_core.parallel import Pipeline, TensorParallel
from tok_core.runtime import HEARTBEAT
from tok_core.worker.draft_model import DraftModelRunner
from tok_core.worker.runner import Runner
from tok_core.worker.sleep import SleepingMemory
from tok_core.worker.startup.dummy_steps import largest_step_len
from tok_core.worker.startup.invariance_check import check_rows
from tok_core.worker.startup.kv_scales import CacheTrial, choose_kv_scales, log_cache_error
from tok_core.worker.startup.memory import StepMemory, cache_tokens, measure_steps
from tok_core.worker.startup.precompile import log_compiled
from tok_core.worker.startup.resolve import (
    attention_shape,
    choose_backend,
    dtype_name,
    mask_words,
    quantises_weights,
    resolve_max_model_len,
    resolve_pack_rows,
    warn_without_float8,
)
from tok_core.worker.startup.settings import WorkerSettings, check_settings, resolve_settings
from tok_core.worker.startup.tp_calibration import calibrate_tensor_parallel, log_thresholds
from tok_core.worker.startup.warmup import warm_up
from tok_core.worker.state import WorkerState, kv_bytes_per_token, page_table_bytes
from tok_core.worker.weights import fill_model
from tok_kernels import Backend, NgramTable

if TYPE_CHECKING:
    from tok_core.worker.trace import Tracer

log = logging.getLogger("tok_core")

MAX_PEER_WAIT_SECONDS = 86_400.0  # maximum time that a rank's kernels wait for those of another rank

# Devices on which workers predict drafts. On a CPU, those of the manager cost less: text that nothing predicts took
# 0.98 times as long as without `speculate` instead of 1.06, and new problems of the demo model 0.98 instead of 1.03.
DRAFTING_DEVICES: tuple[str, ...] = ("cuda",)

MakeDraftRunner = Callable[[WorkerState], DraftModelRunner | None]
"""Returns the draft model's runner, with a cache in the pages of the given state; None without a draft model."""


def set_up(
    config: EngineConfig,
    replica: int = 0,
    coordinates: RankCoordinates | None = None,
    rendezvous: Path | Rendezvous | None = None,
    gpu: int | None = None,
    workers_on_host: int | None = None,
    compiler: subprocess.Popen[bytes] | None = None,
) -> tuple[Runner, EngineInfo]:
    """Return a worker's runner, ready to launch steps, and the sizes and settings that the worker resolved.

    config           `config.model` is a local directory
    coordinates      None: the replica has a single worker
    rendezvous       file or address through which the workers of `replica` find each other
    gpu              see `choose_device`
    workers_on_host  number of workers that share this host's memory; None: all workers of all replicas
    compiler         process of `start_compiler` that this worker may use; None: it starts one if needed

    All workers of a replica call this, and wait for each other in it. Raises ModelError, InvalidField, or EngineError
    if the memory is too small: see `require_memory`.
    """
    timer = StartupTimer()
    coordinates = coordinates or next(all_coordinates(config.pp, config.tp))
    workers_on_host = workers_on_host or config.dp * coordinates.workers
    settings, precompilation = resolve_settings(config, replica, coordinates, rendezvous, gpu, compiler)
    peers, max_step_tokens = settings.peers, settings.sizes.max_step_tokens
    timer.log_phase("device and peers")
    with precompilation:
        check_settings(settings, workers_on_host)

    # Choose kernels, and load the models.
    with HEARTBEAT.coarse():  # compilers may run for minutes
        precompilation.wait()
        timer.log_phase("kernels compiled ahead")
        backend, draft_backend = _choose_backends(settings)
    timer.log_phase("choice of kernels")
    sleeping_memory = SleepingMemory(settings.device) if config.enable_sleep_mode else None
    model = _load_model(settings, backend, sleeping_memory)
    make_draft_runner = _load_draft_model(settings, draft_backend, model)
    timer.log_phase("weights")

    # Measure what depends on the loaded model: bits of GEMMs, layouts, scales of the KV cache, memory of steps.
    if settings.checks_batch_invariance:
        check_rows(model, max_step_tokens)
        timer.log_phase("bits of linear layers")
    with HEARTBEAT.coarse():
        calibrate_tensor_parallel(model, peers, max_step_tokens, config.async_tp_threshold)
    log_thresholds(model, coordinates)
    timer.log_phase("tensor-parallel layouts")
    pipeline = Pipeline(peers, max_step_tokens, settings.model.hidden_size, settings.dtype, settings.sizes.slots)
    scales = None
    if settings.cache_dtype != settings.dtype:
        scales = _choose_kv_scales(settings, model, backend, pipeline)
        timer.log_phase("scales and error of the cache")
    max_pack_rows = peers.all_reduce_min(resolve_pack_rows(config, settings.model, backend))
    predicts = _agree_on_predictions(settings, backend)
    measured, words = None, 0
    if settings.device.type == "cuda":
        words = peers.all_reduce_min(mask_words(settings.model, settings.path))  # workers must measure the same steps
        measured = _measure_steps(
            *(settings, model, backend, pipeline, scales, words, make_draft_runner, max_pack_rows), predicts=predicts
        )
        timer.log_phase("largest step, and rows of graphs")

    # Allocate the KV cache in the memory that is left, and warm up.
    num_pages = _cache_pages(settings, measured, workers_on_host, predicts=predicts)
    num_tokens = num_pages * config.page_size
    max_model_len = resolve_max_model_len(config, settings.model, num_tokens)
    problem = f"a KV cache of {num_tokens} tokens does not fit: lower kv_cache_tokens"
    with _explain(problem, RuntimeError, EngineError):
        state = _new_state(
            *(settings, scales, num_pages, max_model_len, sleeping_memory),
            predicts=predicts,
        )
    runner = Runner(
        *(model, backend, state),
        tracer=_tracer(settings) if replica == 0 else None,
        pipeline=pipeline,
        start_weights=partial(fill_model, config, settings.path),
        memory=sleeping_memory,
        prefix_groups=config.prefix_groups,
        draft_model=make_draft_runner(state),
        max_pack_rows=max_pack_rows,
    )
    timer.log_phase("cache")
    if measured is not None:
        problem = f"no memory is left for steps beside a KV cache of {num_tokens} tokens"
        with _explain(f"{problem}: lower kv_cache_tokens or gpu_memory_fraction", torch.OutOfMemoryError):
            warm_up(runner, measured, max_step_tokens, words)
        log_compiled()
    peers.all_reduce_min(0)  # waits for the others
    timer.log_phase("graphs and warm-up")
    settings.cache_directory.write_manifest()
    return runner, _engine_info(settings, runner, max_model_len)


def _engine_info(settings: WorkerSettings, runner: Runner, max_model_len: int) -> EngineInfo:
    """Return what the engine and its manager need to know of the worker."""
    config, model, draft, sizes = settings.config, settings.model, settings.draft, settings.sizes
    tensor = runner.model.tensor
    return EngineInfo(
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        max_model_len=max_model_len,
        num_pages=runner.state.num_pages,
        page_size=config.page_size,
        max_running=sizes.max_running,
        max_step_tokens=sizes.max_step_tokens,
        device=str(settings.device),
        dtype=dtype_name(settings.dtype),
        backend=runner.backend.name,
        hidden_size=model.hidden_size,
        linear_layers=str(settings.quantization),
        sampling_defaults=settings.sampling_defaults,
        max_all_reduce_tokens=None if tensor is None else tensor.max_all_reduce_tokens,
        min_overlap_tokens=None if tensor is None else tensor.min_overlap_tokens,
        short_prompt=short_prompt(model.rope_scaling, max_model_len),
        rope_depends_on_length=rope_depends_on_length(model.rope_scaling),
        tp=config.tp,
        pp=config.pp,
        ep=config.ep,
        redundant_experts=config.redundant_experts,
        draft_slots=sizes.draft_slots,
        draft_len=0 if draft is None else min(draft.config.max_positions, max_model_len),
        draft_head=draft is not None and draft.config.eagle3 is not None,
        drafts_on_device=runner.state.ngrams is not None,
        draft_share=0.0 if draft is None else draft.weight_share(model, settings.dtype, settings.quantization),
    )


def _choose_backends(settings: WorkerSettings) -> tuple[Backend, Backend]:
    """Return the kernel backends of the target model and of the draft model, if there is one, for their shards."""

    def choose(model: ModelConfig, cache_dtype: torch.dtype) -> Backend:
        shape = attention_shape(model, settings.config.page_size, settings.dtype, cache_dtype)
        return choose_backend(settings.config, settings.device, shape, settings.cache_directory.calibration)

    backend = choose(settings.local, settings.cache_dtype)
    return backend, backend if settings.draft is None else choose(settings.draft.local, settings.dtype)


def _load_model(settings: WorkerSettings, backend: Backend, sleeping_memory: SleepingMemory | None) -> CausalLM:
    """Build this worker's shard of the model, and fill it. Raise EngineError if it does not fit on the device."""
    config, peers, quantization = settings.config, settings.peers, settings.quantization
    tensor = None
    if peers.tensor is not None:
        max_wait = min(config.step_timeout, MAX_PEER_WAIT_SECONDS)
        tensor = TensorParallel(peers.tensor, peers.device, max_wait, ordered=config.batch_invariant)
    if peers.coordinates.number == 0 and quantises_weights(quantization):
        log.info("linear layers are %s", quantization)
        warn_without_float8(quantization, peers.device)
    allocate = None if sleeping_memory is None else sleeping_memory.weights.zeros
    try:
        model = build(
            *(settings.model, backend, peers.device, settings.dtype),
            *(peers.coordinates, tensor, quantization, allocate),
        )
    except (torch.OutOfMemoryError, EngineError) as error:
        raise EngineError(f"the weights of {config.model} do not fit on {peers.device}: {error}") from None
    fill_model(config, settings.path, model)
    return model


def _load_draft_model(settings: WorkerSettings, backend: Backend, target: CausalLM) -> MakeDraftRunner:
    """Load the draft model, if there is one, and return the function that makes its runner.

    The function raises EngineError if the draft model's cache does not fit on the device.
    """
    plan = settings.draft
    if plan is None:
        return lambda state: None
    model = plan.build(backend, settings.device, settings.dtype, target, partial(fill_model, settings.config))

    def make_draft_runner(state: WorkerState) -> DraftModelRunner:
        tokens = state.num_pages * state.page_size
        problem = f"a KV cache of {tokens} tokens does not fit beside the draft model: lower kv_cache_tokens"
        with _explain(problem, RuntimeError, EngineError):
            return DraftModelRunner(model, backend, state, settings.model.vocab_size)

    return make_draft_runner


def _choose_kv_scales(
    settings: WorkerSettings, model: CausalLM, backend: Backend, pipeline: Pipeline
) -> torch.Tensor | None:
    """Return the scales of an 8-bit KV cache; the first replica logs the error that the cache causes."""
    config = settings.config
    trial = CacheTrial(model, backend, pipeline, config.page_size, settings.sizes.max_step_tokens)
    scales, origin = choose_kv_scales(config.kv_cache_dtype, trial, dummy=config.load_format == "dummy")
    if settings.replica == 0:
        log_cache_error(trial, settings.cache_dtype, scales, origin)
    return scales


def _measure_steps(
    settings: WorkerSettings,
    model: CausalLM,
    backend: Backend,
    pipeline: Pipeline,
    scales: torch.Tensor | None,
    words: int,
    make_draft_runner: MakeDraftRunner,
    max_pack_rows: int,
    *,
    predicts: bool,
) -> StepMemory:
    """Measure the memory of steps, on a temporary state whose sequences all share one page."""
    slots, max_step_tokens = settings.sizes.slots, settings.sizes.max_step_tokens
    length = largest_step_len(model.config.max_positions, slots, max_step_tokens)
    state = _new_state(settings, scales, num_pages=1, max_len=length, predicts=predicts)
    graphs = settings.config.cuda_graphs and backend.capturable
    problem = f"a step of {max_step_tokens} tokens and {slots} sampled rows does not fit beside the weights"
    try:
        with _explain(f"{problem}: lower max_step_tokens or max_running", torch.OutOfMemoryError):
            runner = Runner(
                *(model, backend, state),
                pipeline=pipeline,
                draft_model=make_draft_runner(state),
                max_pack_rows=max_pack_rows,
            )
            return measure_steps(runner, max_step_tokens, graphs=graphs, mask_words=words)
    finally:
        del state
        torch.cuda.empty_cache()


def _predicts_drafts(settings: WorkerSettings, backend: Backend) -> bool:
    """Return whether this worker can predict drafts: it has all layers, and its kernels read lengths on the device.

    No worker does if there is a draft model.
    """
    config, planned = settings.config, backend.needs_host_lengths & {"decode", "cascade"}
    if config.speculate == "off" or config.pp > 1 or settings.draft is not None:
        return False
    if settings.device.type not in DRAFTING_DEVICES:
        return False
    return not planned and settings.model.vocab_size <= NgramTable.MAX_VOCAB


def _agree_on_predictions(settings: WorkerSettings, backend: Backend) -> bool:
    """Return whether all workers of the replica can predict drafts: ranks may have chosen other kernels."""
    predicts = bool(settings.peers.all_reduce_min(_predicts_drafts(settings, backend)))
    if settings.config.speculate != "off" and settings.peers.coordinates.number == 0:
        log.debug(
            "drafts are accepted by the %s", "worker" if predicts else "manager: steps with drafts wait for values"
        )
    return predicts


def _cache_pages(settings: WorkerSettings, measured: StepMemory | None, workers_on_host: int, *, predicts: bool) -> int:
    """Return the number of pages of the KV cache: the least among the replica's workers."""
    config, draft, slots = settings.config, settings.draft, settings.sizes.slots
    bytes_per_token = kv_bytes_per_token(settings.local, settings.cache_dtype)
    if draft is not None:
        bytes_per_token += draft.bytes_per_token(settings.dtype)
    table_bytes = page_table_bytes(slots, config.max_model_len or settings.model.max_positions, config.page_size)
    table_bytes += NgramTable.BYTES if predicts else 0
    tokens = cache_tokens(config, bytes_per_token, table_bytes, settings.device, measured, workers_on_host)
    return settings.peers.all_reduce_min(tokens) // config.page_size


def _new_state(
    settings: WorkerSettings,
    scales: torch.Tensor | None,
    num_pages: int,
    max_len: int,
    sleeping_memory: SleepingMemory | None = None,
    *,
    predicts: bool,
) -> WorkerState:
    config = settings.config
    return WorkerState(
        settings.local,
        settings.device,
        settings.cache_dtype,
        slots=settings.sizes.slots,
        num_pages=num_pages,
        page_size=config.page_size,
        pages_per_slot=-(-max_len // config.page_size),
        scales=scales,
        processed_logprobs=config.logprobs_mode == "processed_logprobs",
        max_draft_tokens=config.max_draft_tokens if predicts else 0,
        memory=None if sleeping_memory is None else sleeping_memory.kv_cache,
    )


def _tracer(settings: WorkerSettings) -> Tracer | None:
    if settings.config.trace is None:
        return None
    from tok_core.worker.trace import Tracer  # importing it takes seconds, and few runs trace

    return Tracer.of(settings.config, settings.peers.coordinates, settings.device)


@contextmanager
def _explain(problem: str, *errors: type[Exception]) -> Iterator[None]:
    """Replace `errors` that are raised in this context by an EngineError that begins with `problem`."""
    try:
        yield
    except errors as error:
        raise EngineError(f"{problem} ({error})") from None


class StartupTimer:
    """Timer of consecutive phases of the startup, logged at level debug."""

    def __init__(self) -> None:
        self._phase_start = time.monotonic()

    def log_phase(self, phase: str) -> None:
        """Log the time since the last call, or since construction, as that of `phase`, and count a heartbeat."""
        HEARTBEAT.turned()
        now = time.monotonic()
        log.debug("start: %s: %.1f s", phase, now - self._phase_start)
        self._phase_start = now
