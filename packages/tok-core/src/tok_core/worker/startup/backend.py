"""Choose a worker's device, data types and kernel backend; resolve every `auto`."""

from __future__ import annotations

from pathlib import Path

import torch

from tok_core.config import EngineConfig, RankCoordinates
from tok_core.errors import InvalidField
from tok_core.model_config import ModelConfig
from tok_core.quantization import QuantizationConfig
from tok_kernels import AttentionShape, Backend, choose

FLOAT8_CAPABILITY = (8, 9)  # lowest compute capability with float8 conversion and GEMMs


def choose_device(
    config: EngineConfig, replica: int, coordinates: RankCoordinates, index: int | None = None
) -> torch.device:
    """Return the requested device of the worker at `coordinates`; `auto` is a GPU if there is one.

    `index` is the GPU assigned to the worker; None: derive it from replica and coordinates. Raises InvalidField if
    there is no such device, or too few for all workers.
    """
    requested, gpus = config.device, torch.cuda.device_count() if torch.cuda.is_available() else 0
    if requested == "cuda" and not gpus:
        raise InvalidField("device", requested, "cpu (no CUDA device is available here)")
    if requested == "cpu" or not gpus:
        return torch.device("cpu")
    if index is not None:
        return torch.device("cuda", index)
    if gpus < config.dp * coordinates.workers:
        field = next(name for name in ("tp", "pp", "dp") if getattr(config, name) > 1)
        degrees = f"{config.dp} × {coordinates.stages} × {coordinates.ranks}"
        raise InvalidField(field, getattr(config, field), f"dp × pp × tp at most {gpus}, the GPUs here ({degrees})")
    return torch.device("cuda", replica * coordinates.workers + coordinates.number)


def choose_dtype(requested: str, device: torch.device) -> torch.dtype:
    """Return the requested dtype; `auto` is bfloat16 on a GPU and float32 on a CPU."""
    if requested == "auto":
        requested = "bfloat16" if device.type == "cuda" else "float32"
    dtype: torch.dtype = getattr(torch, requested)
    return dtype


def choose_cache_dtype(requested: str, dtype: torch.dtype, quantization: QuantizationConfig) -> torch.dtype:
    """Return the dtype of cached keys and values; `auto` is float8_e4m3fn if the checkpoint has scales for it."""
    if requested == "unquantized" or (requested == "auto" and quantization.kv_scales is None):
        return dtype
    return torch.int8 if requested == "int8" else torch.float8_e4m3fn


def require_float8(requested: str, device: torch.device) -> None:
    """Raise InvalidField if a GPU cannot convert float8, and hence its kernels cannot read a float8 KV cache."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FLOAT8_CAPABILITY:
        raise InvalidField("kv_cache_dtype", requested, f"int8, unquantized on {device}, which cannot convert float8")


def attention_shape(model: ModelConfig, page_size: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> AttentionShape:
    """Return the shape of the model's attention, for `tok_kernels.choose`."""
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
    config: EngineConfig, device: torch.device, shape: AttentionShape, calibration_directory: Path | None = None
) -> Backend:
    """Return the requested backend; `auto` on a GPU is the fastest one, measured the first time.

    `calibration_directory` stores the measurements; None: the user's cache directory.

    Raises InvalidField, with the reason, if it cannot compute the shape on the device.
    """
    requested = config.backend
    try:
        return choose(device, requested, shape, calibration_directory, batch_invariant=config.batch_invariant)
    except ValueError as error:
        raise InvalidField(
            "backend", requested, str(error).partition("allowed")[2].lstrip(": ") or str(error)
        ) from None
