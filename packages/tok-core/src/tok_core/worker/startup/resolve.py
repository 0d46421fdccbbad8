"""Resolve what an EngineConfig leaves open: device, dtypes, kernel backend, limits of steps, sampling defaults."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

from tok_core.config import MAX_DRAFTING, EngineConfig, RankCoordinates
from tok_core.errors import InvalidField
from tok_core.model_config import Fields, ModelConfig, read_config
from tok_core.models import resolve_tied_embeddings
from tok_core.quantization import QuantizationConfig, ScaledMethod
from tok_core.sampling_params import SamplingParams
from tok_core.text import with_end_token
from tok_kernels import AttentionShape, Backend, choose

log = logging.getLogger("tok_core")

FLOAT8_CAPABILITY = (8, 9)  # lowest compute capability with float8 conversion and GEMMs
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # read from generation_config.json


def resolve_model_config(config: EngineConfig, path: Path) -> ModelConfig:
    """Return the model's config in directory `path`, with embeddings tied or untied as in the checkpoint.

    Sliding windows that are not shorter than `max_model_len` are dropped. The tokenizer's end token ends texts, too, as
    in vLLM and SGLang: fine-tuned models may name another one there than in their configuration.
    """
    model = read_config(path, config.ignore_config_keys or ())
    ends = with_end_token(model.eos_token_ids, Path(config.tokenizer or path), model.vocab_size)
    if config.load_format != "dummy" and model.tied:
        model = resolve_tied_embeddings(model, path)
        if not model.tied:
            log.warning(
                "%s: tie_word_embeddings is true, but lm_head.weight differs from the embedding and is used", path
            )
    longest = config.max_model_len or model.max_positions
    windows = tuple(None if window is None or window >= longest else window for window in model.windows)
    return replace(model, windows=windows, eos_token_ids=ends)


def choose_device(
    config: EngineConfig, replica: int, coordinates: RankCoordinates, gpu: int | None = None
) -> torch.device:
    """Return the requested device of the worker at `coordinates`; `auto` is a GPU if there is one.

    `gpu` is the index of the GPU assigned to the worker; None: derive it from replica and coordinates. Raises
    InvalidField if there is no such device, or too few for all workers.
    """
    requested, gpus = config.device, torch.cuda.device_count() if torch.cuda.is_available() else 0
    if requested == "cuda" and not gpus:
        raise InvalidField("device", requested, "cpu (no CUDA device is available here)")
    if requested == "cpu" or not gpus:
        return torch.device("cpu")
    if gpu is not None:
        return torch.device("cuda", gpu)
    if gpus < config.dp * coordinates.workers:
        field = next(name for name in ("tp", "pp", "dp") if getattr(config, name) > 1)
        degrees = f"{config.dp} × {coordinates.stages} × {coordinates.ranks}"
        raise InvalidField(field, getattr(config, field), f"dp × pp × tp at most {gpus}, the GPUs here ({degrees})")
    return torch.device("cuda", replica * coordinates.workers + coordinates.number)


def choose_dtype(requested: str, device: torch.device) -> torch.dtype:
    """Return the requested dtype of weights; `auto` is bfloat16 on a GPU and float32 on a CPU."""
    if requested == "auto":
        requested = "bfloat16" if device.type == "cuda" else "float32"
    dtype: torch.dtype = getattr(torch, requested)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype's name in settings, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def choose_cache_dtype(requested: str, dtype: torch.dtype, quantization: QuantizationConfig) -> torch.dtype:
    """Return the dtype of cached keys and values; `auto` is float8_e4m3fn if the checkpoint has scales for it."""
    if requested == "unquantized" or (requested == "auto" and quantization.kv_scales is None):
        return dtype
    return torch.int8 if requested == "int8" else torch.float8_e4m3fn


def require_float8_cache(requested: str, device: torch.device) -> None:
    """Raise InvalidField if a GPU cannot convert float8, so that its kernels cannot read a float8 KV cache."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FLOAT8_CAPABILITY:
        raise InvalidField("kv_cache_dtype", requested, f"int8, unquantized on {device}, which cannot convert float8")


def quantises_weights(quantization: QuantizationConfig) -> bool:
    """Return whether some weights are quantised; scales of the KV cache do not count."""
    return replace(quantization, kv_scales=None) != QuantizationConfig()


def warn_without_float8(quantization: QuantizationConfig, device: torch.device) -> None:
    """Log a warning if the model has float8 weights and the GPU has no float8 GEMMs."""
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


def require_batch_invariance(config: EngineConfig, quantization: QuantizationConfig, device: torch.device) -> None:
    """Raise InvalidField for settings with which `batch_invariant` is not supported on a GPU."""
    if quantises_weights(quantization):
        raise InvalidField("batch_invariant", True, f"false on {device.type} if weights are quantised ({quantization})")
    if choose_cache_dtype(config.kv_cache_dtype, torch.bfloat16, quantization) != torch.bfloat16:
        allowed = f"unquantized on {device.type} with batch_invariant"
        raise InvalidField("kv_cache_dtype", config.kv_cache_dtype, allowed)
    if config.tp > 1:
        raise InvalidField("tp", config.tp, f"1 on {device.type} with batch_invariant")


def require_sleep_support(device: torch.device) -> None:
    """Raise InvalidField if the memory of a worker that sleeps cannot be released on this system."""
    if sys.platform != "linux":
        raise InvalidField("enable_sleep_mode", True, "false (memory is given back on Linux only)")
    if device.type == "cuda" and (find_spec("cuda") is None or find_spec("cuda.bindings") is None):
        raise InvalidField("enable_sleep_mode", True, "false (the package cuda-bindings is not installed)")


def attention_shape(model: ModelConfig, page_size: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> AttentionShape:
    """Return the shape of a model's attention, by which `tok_kernels.choose` chooses kernels."""
    return AttentionShape(
        heads=model.num_heads,
        kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        page_size=page_size,
        layers=model.num_layers,
        dtype=dtype,
        cache_dtype=cache_dtype,
    )


def choose_backend(
    config: EngineConfig, device: torch.device, shape: AttentionShape, calibration_directory: Path | None
) -> Backend:
    """Return the requested kernel backend; `auto` on a GPU is the fastest one, measured the first time.

    `calibration_directory` stores the measurements; None: the user's cache directory. Raises InvalidField, with the
    reason, if the backend cannot compute attention of this shape on the device.
    """
    requested = config.backend
    try:
        return choose(device, requested, shape, calibration_directory, batch_invariant=config.batch_invariant)
    except ValueError as error:
        raise InvalidField(
            "backend", requested, str(error).partition("allowed")[2].lstrip(": ") or str(error)
        ) from None


class StepSizes(NamedTuple):
    """Limits of steps.

    max_running      sequences that run at the same time
    max_step_tokens  decode rows and prefill tokens of a step
    draft_slots      slots beyond `max_running`, which steps lend to drafted tokens while `max_running` samples run
    """

    max_running: int
    max_step_tokens: int
    draft_slots: int

    @property
    def slots(self) -> int:
        """Return the number of slots, which is also the maximum number of rows that a step samples."""
        return self.max_running + self.draft_slots


def resolve_pack_rows(config: EngineConfig, model: ModelConfig, backend: Backend) -> int:
    """Return the maximum rows of a pack (`AttentionBatch.packs`); 1, for no packs, unless the engine speculates."""
    return 1 if config.speculate == "off" else backend.max_pack_rows(model.num_heads // model.num_kv_heads)


def resolve_step_sizes(config: EngineConfig, device_type: str) -> StepSizes:
    """Return the limits of steps. Raises InvalidField if `max_running` exceeds `max_step_tokens`."""
    default_running, default_step_tokens = (8192, 8192) if device_type == "cuda" else (256, 1024)
    max_running = config.max_running or min(default_running, config.max_step_tokens or default_running)
    max_step_tokens = config.max_step_tokens or max(default_step_tokens, max_running)
    if max_step_tokens < max_running:
        raise InvalidField("max_step_tokens", max_step_tokens, f"at least max_running ({max_running})")
    draft_slots = 0
    if config.speculate != "off":
        rows = min(max_running * (1 + config.max_draft_tokens), MAX_DRAFTING, max_step_tokens)
        draft_slots = max(rows - max_running, 0)
    return StepSizes(max_running, max_step_tokens, draft_slots)


def resolve_max_model_len(config: EngineConfig, model: ModelConfig, cache_tokens: int) -> int:
    """Return the length of the longest sequence: as configured, else limited by the model and by the KV cache.

    Raises InvalidField for a configured length above one of these limits, and for a length below 2.
    """
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


def mask_words(model: ModelConfig, path: Path) -> int:
    """Return the 32-bit words of a grammar mask; 0 without a tokenizer, and so without guided decoding."""
    return -(-model.vocab_size // 32) if (path / "tokenizer.json").is_file() else 0


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
