"""Set up a worker from an EngineConfig: load the model, size the cache, resolve every `auto`."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tok_core.config import EngineConfig, RankCoordinates, all_coordinates
from tok_core.errors import EngineError, InvalidField
from tok_core.messages import EngineInfo, Rendezvous
from tok_core.model_config import Fields, ModelConfig, short_prompt
from tok_core.models import CausalLM, build, fill_dummy_weights, load_checkpoint
from tok_core.parallel import Pipeline, ProcessGroups, ShardPlan, TensorParallel, join
from tok_core.quantization import QuantizationConfig, ScaledMethod, read_quantization
from tok_core.runtime import HEARTBEAT
from tok_core.sampling_params import SamplingParams
from tok_core.worker.draft_model import DraftModelRunner
from tok_core.worker.runner import Runner
from tok_core.worker.sleep import SleepingMemory
from tok_core.worker.startup.backend import (
    FLOAT8_CAPABILITY,
    attention_shape,
    choose_backend,
    choose_cache_dtype,
    choose_device,
    choose_dtype,
    require_float8,
)
from tok_core.worker.startup.cache_directory import CacheDirectory
from tok_core.worker.startup.draft import DraftPlan, check_draft_tensors, read_draft
from tok_core.worker.startup.invariance_check import check_rows
from tok_core.worker.startup.kv_scales import CacheTrial, choose_kv_scales, report_cache_error
from tok_core.worker.startup.memory import StepMemory, cache_tokens, measure, measured_len
from tok_core.worker.startup.memory_check import require_memory
from tok_core.worker.startup.precompile import Precompilation, log_compiled
from tok_core.worker.startup.sizes import StepSizes, mask_words, resolve_model_config, resolve_step_sizes
from tok_core.worker.startup.tp_calibration import calibrate
from tok_core.worker.startup.warmup import warm_up
from tok_core.worker.state import WorkerState, kv_bytes_per_token, page_table_bytes
from tok_kernels import Backend, DynamicScaling

if TYPE_CHECKING:
    from tok_core.worker.trace import Tracer

log = logging.getLogger("tok_core")

MAX_PATIENCE = 86_400.0  # maximum seconds that a rank's kernels wait for those of another rank
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # read from generation_config.json


def set_up(
    config: EngineConfig,
    replica: int = 0,
    coordinates: RankCoordinates | None = None,
    rendezvous: Path | Rendezvous | None = None,
    gpu: int | None = None,
    workers_on_host: int | None = None,
    compiler: subprocess.Popen[bytes] | None = None,
) -> tuple[Runner, EngineInfo]:
    """Return a worker's runner and the sizes and settings that it resolved. Waits for the replica's other workers.

    config           `config.model` is a local directory
    coordinates      None: the replica has a single worker
    rendezvous       file or address through which the workers of `replica` find each other
    gpu              see `choose_device`
    workers_on_host  number of workers that share this host's memory; None: all workers of all replicas
    compiler         process of `start_compiler` that this worker may use; None: it starts one if needed

    Raises ModelError, InvalidField, or EngineError if the memory is too small: see `require_memory`.
    """
    path, coordinates = Path(config.model), coordinates or next(all_coordinates(config.pp, config.tp))
    clock = StartupTimer()
    model_config = resolve_model_config(config, path)
    draft = read_draft(config, model_config, coordinates)
    defaults = sampling_defaults(path) if config.generation_config == "auto" else {}
    local = ShardPlan.of(model_config, coordinates).local(model_config)
    device = choose_device(config, replica, coordinates, gpu)
    cache = CacheDirectory.of(config, device)
    precompilation = Precompilation(config, device, coordinates.workers, compiler)
    peers = join(coordinates, rendezvous, device)
    clock.done("device and peers")
    dtype = choose_dtype(config.dtype, device)
    workers_on_host = workers_on_host or config.dp * coordinates.workers
    require_memory(config, model_config, dtype, peers, workers_on_host)
    if draft is not None and config.load_format != "dummy":
        check_draft_tensors(draft, dtype)
    quantization = read_quantization(path, config.quantization)
    cache_dtype = choose_cache_dtype(config.kv_cache_dtype, dtype, quantization)
    if cache_dtype == torch.float8_e4m3fn and config.backend != "reference":
        require_float8(config.kv_cache_dtype, device)
    if config.batch_invariant and device.type != "cpu":
        _require_invariant(config, quantization, device)
    shape = attention_shape(local, config.page_size, dtype, cache_dtype)
    with HEARTBEAT.coarse():  # compilers may run for minutes
        precompilation.wait()
        clock.done("kernels compiled ahead")
        backend = choose_backend(config, device, shape, cache.calibration)
        draft_backend = backend if draft is None else _draft_backend(config, draft, device, dtype, cache)
    clock.done("choice of kernels")
    memory = sleeping_memory(device) if config.enable_sleep_mode else None
    model = _load_model(config, path, model_config, backend, peers, dtype, quantization, memory)
    draft_model = None
    if draft is not None:
        draft_model = draft.build(draft_backend, device, dtype, model, partial(fill_model, config))
    clock.done("weights")
    sizes = resolve_step_sizes(config, device.type)
    max_step_tokens = sizes.max_step_tokens
    if config.batch_invariant and device.type != "cpu":
        check_rows(model, max_step_tokens)
        clock.done("bits of linear layers")
    with HEARTBEAT.coarse():
        calibrate(model, peers, max_step_tokens, config.async_tp_threshold)
    max_all_reduce_tokens, min_overlap_tokens = _thresholds(model, coordinates)
    clock.done("tensor-parallel layouts")
    pipeline = Pipeline(peers, max_step_tokens, model_config.hidden_size, dtype, sizes.slots)
    scales = None
    if cache_dtype != dtype:
        trial = CacheTrial(model, backend, pipeline, config.page_size, max_step_tokens)
        scales, origin = choose_kv_scales(config.kv_cache_dtype, trial)
        if replica == 0:
            report_cache_error(trial, cache_dtype, scales, origin)
        clock.done("scales and error of the cache")
    measured, words = None, 0
    if device.type == "cuda":
        words = peers.all_reduce_min(mask_words(model_config, path))  # all workers must measure the same steps
        measured = _measure(
            *(config, model, backend, pipeline, cache_dtype, scales, sizes, words),
            partial(_draft_runner, draft_model, draft_backend, vocab_size=model_config.vocab_size),
        )
        clock.done("largest step, and rows of graphs")
    tables = page_table_bytes(sizes.slots, config.max_model_len or model_config.max_positions, config.page_size)
    per_token = kv_bytes_per_token(local, cache_dtype) + (0 if draft is None else draft.bytes_per_token(dtype))
    tokens = peers.all_reduce_min(cache_tokens(config, per_token, tables, device, measured, workers_on_host))
    num_pages = tokens // config.page_size
    max_model_len = _max_model_len(config, model_config, num_pages * config.page_size)
    state = _state(config, local, device, cache_dtype, scales, sizes.slots, num_pages, max_model_len, memory)
    draft_runner = _draft_runner(draft_model, draft_backend, state, vocab_size=model_config.vocab_size)
    tracer = _tracer(config, coordinates, device) if replica == 0 else None
    start_weights = partial(fill_model, config, path)
    runner = Runner(
        *(model, backend, state, tracer, pipeline, start_weights, memory),
        prefix_groups=config.prefix_groups,
        draft_model=draft_runner,
    )
    clock.done("cache")
    if measured is not None:
        _warm_up(runner, measured, max_step_tokens, words)
        log_compiled()
    peers.all_reduce_min(0)  # waits for the others
    clock.done("graphs and warm-up")
    cache.write_manifest()
    info = EngineInfo(
        vocab_size=model_config.vocab_size,
        eos_token_ids=model_config.eos_token_ids,
        max_model_len=max_model_len,
        num_pages=num_pages,
        page_size=config.page_size,
        max_running=sizes.max_running,
        max_step_tokens=max_step_tokens,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        backend=backend.name,
        hidden_size=model_config.hidden_size,
        linear_layers=str(read_quantization(path, config.quantization)),
        sampling_defaults=defaults,
        max_all_reduce_tokens=max_all_reduce_tokens,
        min_overlap_tokens=min_overlap_tokens,
        short_prompt=short_prompt(model_config.rope_scaling, max_model_len),
        rope_depends_on_length=isinstance(model_config.rope_scaling, DynamicScaling),
        tp=config.tp,
        pp=config.pp,
        ep=config.ep,
        redundant_experts=config.redundant_experts,
        draft_slots=sizes.draft_slots,
        draft_len=0 if draft is None else min(draft.config.max_positions, max_model_len),
        draft_head=draft is not None and draft.config.eagle3 is not None,
        draft_share=0.0 if draft is None else draft.share(model_config, dtype, quantization),
    )
    return runner, info


def _draft_backend(
    config: EngineConfig, draft: DraftPlan, device: torch.device, dtype: torch.dtype, cache: CacheDirectory
) -> Backend:
    shape = attention_shape(draft.local, config.page_size, dtype, dtype)
    return choose_backend(config, device, shape, cache.calibration)


def _draft_runner(
    model: CausalLM | None, backend: Backend, state: WorkerState, *, vocab_size: int
) -> DraftModelRunner | None:
    """Return the runner of the draft model `model`, with a cache in the pages of `state`; None without a model."""
    if model is None:
        return None
    try:
        return DraftModelRunner(model, backend, state, vocab_size)
    except (torch.OutOfMemoryError, RuntimeError, EngineError) as error:
        tokens = state.num_pages * state.page_size
        allowed = f"a KV cache of {tokens} tokens does not fit beside the draft model: lower kv_cache_tokens"
        raise EngineError(f"{allowed} ({error})") from None


def _require_invariant(config: EngineConfig, quantization: QuantizationConfig, device: torch.device) -> None:
    """Raise InvalidField for a configuration that `batch_invariant` does not support on a GPU."""
    if replace(quantization, kv_scales=None) != QuantizationConfig():
        raise InvalidField("batch_invariant", True, f"false on {device.type} if weights are quantised ({quantization})")
    if choose_cache_dtype(config.kv_cache_dtype, torch.bfloat16, quantization) != torch.bfloat16:
        allowed = f"unquantized on {device.type} with batch_invariant"
        raise InvalidField("kv_cache_dtype", config.kv_cache_dtype, allowed)
    if config.tp > 1:
        raise InvalidField("tp", config.tp, f"1 on {device.type} with batch_invariant")


def sleeping_memory(device: torch.device) -> SleepingMemory:
    """Return the memory of a worker that may sleep. Raise InvalidField if it cannot be released on this system."""
    if sys.platform != "linux":
        raise InvalidField("enable_sleep_mode", True, "false (memory is given back on Linux only)")
    if device.type == "cuda" and (find_spec("cuda") is None or find_spec("cuda.bindings") is None):
        raise InvalidField("enable_sleep_mode", True, "false (the package cuda-bindings is not installed)")
    return SleepingMemory(device)


def _load_model(
    config: EngineConfig,
    path: Path,
    model_config: ModelConfig,
    backend: Backend,
    peers: ProcessGroups,
    dtype: torch.dtype,
    quantization: QuantizationConfig,
    memory: SleepingMemory | None,
) -> CausalLM:
    tensor = None
    if peers.tensor is not None:
        tensor = TensorParallel(
            peers.tensor, peers.device, min(config.step_timeout, MAX_PATIENCE), ordered=config.batch_invariant
        )
    if peers.coordinates.number == 0 and replace(quantization, kv_scales=None) != QuantizationConfig():
        log.info("linear layers are %s", quantization)
        report_missing_float8(quantization, peers.device)
    try:
        allocate = None if memory is None else memory.weights.zeros
        model = build(model_config, backend, peers.device, dtype, peers.coordinates, tensor, quantization, allocate)
    except (torch.OutOfMemoryError, EngineError) as error:
        raise EngineError(f"the weights of {config.model} do not fit on {peers.device}: {error}") from None
    fill_model(config, path, model)
    return model


def fill_model(config: EngineConfig, path: Path, model: CausalLM) -> None:
    """Fill the model with the checkpoint in directory `path`, or with dummy weights, as the configuration says.

    The dummy weights of a draft head speak no language.
    """
    if config.load_format == "dummy" and model.config.eagle3 is not None:
        fill_dummy_weights(model, config.seed)
    elif config.load_format == "dummy":
        fill_dummy_weights(
            model,
            config.seed,
            eos_probability=config.eos_probability,
            eos_temperature=config.eos_temperature,
            moe_skew=config.moe_skew,
            markov_probability=config.markov_probability,
        )
    else:
        load_checkpoint(model, path)


def report_missing_float8(quantization: QuantizationConfig, device: torch.device) -> None:
    """Warn if the GPU has no float8 GEMMs for the model's float8 weights."""
    methods = quantization.method, *(method for _, method in quantization.overrides)
    float8 = any(isinstance(method, ScaledMethod) and method.dtype.is_floating_point for method in methods)
    if device.type != "cuda" or not float8:
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < FLOAT8_CAPABILITY:
        log.warning(
            "%s has compute capability %d.%d, and float8 arithmetic needs %d.%d: float8 weights save memory here, and "
            "are dequantised before each GEMM",
            *(device, *capability, *FLOAT8_CAPABILITY),
        )


def _thresholds(model: CausalLM, coordinates: RankCoordinates) -> tuple[int | None, int | None]:
    """Return the token thresholds of the model's TensorParallel, or None without it. Worker 0 logs them."""
    tensor = model.tensor
    if tensor is None:
        return None, None
    if coordinates.number == 0:
        overlap = "never" if tensor.min_overlap_tokens is None else f"from {tensor.min_overlap_tokens} tokens on"
        log.info(
            "tp %d: all-reduce up to %d tokens a step, then sequence parallelism; GEMMs overlap with collectives %s",
            *(tensor.ranks, tensor.max_all_reduce_tokens, overlap),
        )
    return tensor.max_all_reduce_tokens, tensor.min_overlap_tokens


def _measure(
    config: EngineConfig,
    model: CausalLM,
    backend: Backend,
    pipeline: Pipeline,
    cache_dtype: torch.dtype,
    scales: torch.Tensor | None,
    sizes: StepSizes,
    words: int,
    draft_runner: Callable[[WorkerState], DraftModelRunner | None],
) -> StepMemory:
    """Measure the memory of steps, on a temporary state whose sequences all share one page."""
    length = measured_len(model.config.max_positions, sizes.slots, sizes.max_step_tokens)
    state = WorkerState(
        model.local,
        pipeline.peers.device,
        cache_dtype,
        slots=sizes.slots,
        num_pages=1,
        page_size=config.page_size,
        pages_per_slot=-(-length // config.page_size),
        scales=scales,
        processed_logprobs=config.logprobs_mode == "processed_logprobs",
    )
    graphs = config.cuda_graphs and backend.capturable
    try:
        return measure(
            Runner(model, backend, state, pipeline=pipeline, draft_model=draft_runner(state)),
            sizes.max_step_tokens,
            graphs=graphs,
            words=words,
        )
    except torch.OutOfMemoryError as error:
        raise EngineError(
            f"a step of {sizes.max_step_tokens} tokens and {sizes.slots} sampled rows does not fit beside the weights: "
            f"lower max_step_tokens or max_running ({error})"
        ) from None
    finally:
        del state
        torch.cuda.empty_cache()


def _warm_up(runner: Runner, measured: StepMemory, max_step_tokens: int, words: int) -> None:
    try:
        warm_up(runner, measured, max_step_tokens, words)
    except torch.OutOfMemoryError as error:
        state = runner.state
        raise EngineError(
            f"no memory is left for steps beside a KV cache of {state.num_pages * state.page_size} tokens: lower "
            f"kv_cache_tokens or gpu_memory_fraction ({error})"
        ) from None


def _tracer(config: EngineConfig, coordinates: RankCoordinates, device: torch.device) -> Tracer | None:
    if config.trace is None:
        return None
    from tok_core.worker.trace import Tracer  # importing it takes seconds, and few runs trace

    return Tracer.of(config, coordinates, device)


def _max_model_len(config: EngineConfig, model: ModelConfig, cache_tokens: int) -> int:
    requested = config.max_model_len
    if requested is not None and requested > model.max_positions:
        raise InvalidField("max_model_len", requested, f"at most {model.max_positions}, the model's own")
    if requested is not None and requested > cache_tokens:
        raise InvalidField("max_model_len", requested, f"at most {cache_tokens}, the tokens of the KV cache")
    length = requested or min(model.max_positions, cache_tokens)
    if length < 2:
        field = "kv_cache_tokens" if requested is None else "max_model_len"
        raise InvalidField(field, length, "at least 2: one token of prompt and one to follow")
    return length


def _state(
    config: EngineConfig,
    model: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    scales: torch.Tensor | None,
    slots: int,
    num_pages: int,
    max_model_len: int,
    memory: SleepingMemory | None,
) -> WorkerState:
    try:
        return WorkerState(
            model,
            device,
            dtype,
            slots=slots,
            num_pages=num_pages,
            page_size=config.page_size,
            pages_per_slot=-(-max_model_len // config.page_size),
            scales=scales,
            processed_logprobs=config.logprobs_mode == "processed_logprobs",
            memory=None if memory is None else memory.kv_cache,
        )
    except (torch.OutOfMemoryError, RuntimeError, EngineError) as error:
        tokens = num_pages * config.page_size
        raise EngineError(f"a KV cache of {tokens} tokens does not fit: lower kv_cache_tokens ({error})") from None


def sampling_defaults(path: Path) -> dict[str, int | float]:
    """Return the fields of SamplingParams that generation_config.json in directory `path` sets.

    Raises ModelError, which names the file and the value, for a value that is not allowed. `do_sample` is ignored, as
    in other servers: a temperature has an effect only when sampling.
    """
    file = path / "generation_config.json"
    if not file.is_file():
        return {}
    fields = Fields.of_file(file)
    defaults = {name: fields.values[name] for name in SAMPLING_DEFAULTS if name in fields}
    try:
        params = SamplingParams(**defaults)  # type: ignore[arg-type]
    except InvalidField as error:
        allowed = f"{error.allowed}; --generation-config none leaves the file out"
        raise fields.wrong(error.field, error.value, allowed) from None
    return {name: getattr(params, name) for name in defaults}


class StartupTimer:
    """Timer of consecutive phases of the startup, logged at level debug."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def done(self, phase: str) -> None:
        """Log the time since the last call, or since construction, as that of `phase`."""
        HEARTBEAT.turned()
        now = time.monotonic()
        log.debug("start: %s: %.1f s", phase, now - self._began)
        self._began = now
