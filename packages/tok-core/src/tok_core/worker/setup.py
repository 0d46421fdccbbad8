"""Setup: from an EngineConfig to a worker ready to run — model loaded, cache sized, every `auto` resolved."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import psutil
import torch

from tok_core.config import EngineConfig
from tok_core.errors import EngineError, InvalidField
from tok_core.messages import EMPTY, EngineInfo, StepInput
from tok_core.model.config import ModelConfig, read_config
from tok_core.model.decoder import CausalLM
from tok_core.model.registry import build
from tok_core.model.weights import dummy, load
from tok_core.worker.draw import CHUNK
from tok_core.worker.runner import Runner
from tok_core.worker.state import WorkerState, kv_bytes_per_token
from tok_kernels import Backend, choose

CPU_MEMORY_SHARE = 0.25  # of the free memory, for the cache, where nothing else is said
CPU_CACHE_TOKENS = 1 << 18  # and no more than this many positions


def set_up(config: EngineConfig) -> tuple[Runner, EngineInfo]:
    """A runner and what it found out; `config.model` is a local directory.

    Raises ModelError, InvalidField, or EngineError where the memory is too small.
    """
    path = Path(config.model)
    model_config = read_config(path)
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    backend = _choose_backend(config.backend, device)
    model = _load_model(config, path, model_config, backend, device, dtype)
    most_running, most_tokens = (8192, 8192) if device.type == "cuda" else (256, 1024)
    max_running = config.max_running or min(most_running, config.max_step_tokens or most_running)
    max_step_tokens = config.max_step_tokens or max(most_tokens, max_running)
    if max_step_tokens < max_running:
        raise InvalidField("max_step_tokens", max_step_tokens, f"at least max_running ({max_running})")
    tokens = _cache_tokens(config, model, backend, device, dtype, max_step_tokens)
    num_pages = tokens // config.page_size
    max_model_len = _max_model_len(config, model_config, num_pages * config.page_size)
    state = _state(config, model_config, device, dtype, max_running, num_pages, max_model_len)
    info = EngineInfo(
        vocab_size=model_config.vocab_size,
        eos_token_ids=model_config.eos_token_ids,
        max_model_len=max_model_len,
        num_pages=num_pages,
        page_size=config.page_size,
        max_running=max_running,
        max_step_tokens=max_step_tokens,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        backend=backend.name,
    )
    return Runner(model, backend, state), info


def choose_device(requested: str) -> torch.device:
    """The device asked for; `auto` is the GPU where there is one. Raises InvalidField where there is none."""
    if requested == "cuda" and not torch.cuda.is_available():
        raise InvalidField("device", requested, "cpu (no CUDA device is available here)")
    if requested == "auto":
        requested = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(requested, 0) if requested == "cuda" else torch.device(requested)


def _choose_backend(requested: str, device: torch.device) -> Backend:
    try:
        return choose(device, requested)
    except ValueError:
        raise InvalidField("backend", requested, f"auto or reference (Triton does not run on {device})") from None


def choose_dtype(requested: str, device: torch.device) -> torch.dtype:
    """The data type asked for; `auto` is bfloat16 on a GPU and float32 on a CPU."""
    if requested == "auto":
        requested = "bfloat16" if device.type == "cuda" else "float32"
    dtype: torch.dtype = getattr(torch, requested)
    return dtype


def _load_model(
    config: EngineConfig,
    path: Path,
    model_config: ModelConfig,
    backend: Backend,
    device: torch.device,
    dtype: torch.dtype,
) -> CausalLM:
    try:
        model = build(model_config, backend, device, dtype)
    except torch.OutOfMemoryError as error:
        raise EngineError(f"the weights of {config.model} do not fit on {device}: {error}") from None
    if config.load_format == "dummy":
        dummy(
            model,
            config.seed,
            eos_probability=config.eos_probability,
            eos_temperature=config.eos_temperature,
        )
    else:
        load(model, path)
    return model


def _cache_tokens(
    config: EngineConfig,
    model: CausalLM,
    backend: Backend,
    device: torch.device,
    dtype: torch.dtype,
    max_step_tokens: int,
) -> int:
    """Positions of the KV cache: as configured, else what the memory leaves beside weights and the largest step."""
    per_token = kv_bytes_per_token(model.config, dtype)
    if config.kv_cache_tokens is not None:
        # A CPU's memory is promised before it is there; what takes more than is free is killed later.
        free = psutil.virtual_memory().available if device.type == "cpu" else None
        if free is not None and config.kv_cache_tokens * per_token > free:
            raise InvalidField(
                "kv_cache_tokens", config.kv_cache_tokens, f"at most {free // per_token}, by free memory"
            )
        return config.kv_cache_tokens
    if device.type != "cuda":
        room = int(psutil.virtual_memory().available * CPU_MEMORY_SHARE)
        return max(config.page_size, min(room // per_token, CPU_CACHE_TOKENS))
    peak = _largest_step_bytes(config, model, backend, device, dtype, max_step_tokens)
    free, total = torch.cuda.mem_get_info(device)
    used_by_others = total - free - torch.cuda.memory_reserved(device)
    room = int(total * config.gpu_memory_fraction) - used_by_others - peak
    if room < per_token * config.page_size:
        raise EngineError(
            f"no memory is left for the KV cache: weights and one step of {max_step_tokens} tokens take "
            f"{peak / 2**30:.1f} GiB of the {total * config.gpu_memory_fraction / 2**30:.1f} GiB allowed; "
            "raise gpu_memory_fraction or lower max_step_tokens"
        )
    return room // per_token


def _largest_step_bytes(
    config: EngineConfig,
    model: CausalLM,
    backend: Backend,
    device: torch.device,
    dtype: torch.dtype,
    tokens: int,
) -> int:
    """Peak of allocated bytes while a step of `tokens` prefill tokens, all drawing, is run."""
    length = min(model.config.max_positions, 512)
    slots = -(-tokens // length)
    pages = -(-length // config.page_size)
    state = WorkerState(
        model.config,
        device,
        dtype,
        slots=slots,
        num_pages=slots * pages,
        page_size=config.page_size,
        pages_per_slot=pages,
    )
    cache = state.kv.nbytes
    torch.cuda.reset_peak_memory_stats(device)
    Runner(model, backend, state).launch(_widest_step(slots, length, pages, tokens)).output()
    peak = torch.cuda.max_memory_allocated(device) - cache
    del state
    torch.cuda.empty_cache()
    return int(peak)


def _widest_step(slots: int, length: int, pages: int, tokens: int) -> StepInput:
    """Prefills `tokens` in `slots` chunks; as many rows draw as a decode step of that size would."""
    slot = np.arange(slots, dtype=np.int32)
    count = np.full(slots, length, np.int32)
    count[-1] = tokens - length * (slots - 1)
    return StepInput(
        step=0,
        new=None,
        page_slot=np.repeat(slot, pages),
        page_index=np.tile(np.arange(pages, dtype=np.int32), slots),
        page_id=np.arange(slots * pages, dtype=np.int32),
        decode_slot=EMPTY,
        group_start=EMPTY,
        group_count=EMPTY,
        group_slot=EMPTY,
        group_kv_end=EMPTY,
        prefill_slot=slot,
        prefill_start=np.zeros(slots, np.int32),
        prefill_count=count,
        prefill_token=np.zeros(tokens, np.int32),
        copy_src=EMPTY,
        copy_dst=EMPTY,
        sample_row=np.arange(tokens, dtype=np.int32) % slots,
        sample_slot=np.arange(tokens, dtype=np.int32) % slots,
        filter_row=np.arange(min(tokens, CHUNK), dtype=np.int32),
        penalty_row=np.arange(min(tokens, CHUNK), dtype=np.int32),
        bias_row=EMPTY,
        top_logprobs=0,
        all_greedy=False,
        max_kv=length,
    )


def _max_model_len(config: EngineConfig, model: ModelConfig, cache_tokens: int) -> int:
    wanted = config.max_model_len
    if wanted is not None and wanted > model.max_positions:
        raise InvalidField("max_model_len", wanted, f"at most {model.max_positions}, the model's own")
    if wanted is not None and wanted > cache_tokens:
        raise InvalidField("max_model_len", wanted, f"at most {cache_tokens}, the tokens of the KV cache")
    length = wanted or min(model.max_positions, cache_tokens)
    if length < 2:
        field = "kv_cache_tokens" if wanted is None else "max_model_len"
        raise InvalidField(field, length, "at least 2: one token of prompt and one to follow")
    return length


def _state(
    config: EngineConfig,
    model: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    slots: int,
    num_pages: int,
    max_model_len: int,
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
        )
    except (torch.OutOfMemoryError, RuntimeError) as error:
        tokens = num_pages * config.page_size
        raise EngineError(f"a KV cache of {tokens} tokens does not fit: lower kv_cache_tokens ({error})") from None
