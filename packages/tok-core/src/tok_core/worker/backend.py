"""What a worker computes with: device, data types and backend, every `auto` resolved."""

from __future__ import annotations

import torch

from tok_core.errors import InvalidField
from tok_core.model.config import ModelConfig
from tok_kernels import AttentionShape, Backend, choose


def choose_device(requested: str) -> torch.device:
    """The device asked for; `auto` is the GPU where there is one. Raises InvalidField where there is none."""
    if requested == "cuda" and not torch.cuda.is_available():
        raise InvalidField("device", requested, "cpu (no CUDA device is available here)")
    if requested == "auto":
        requested = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(requested, 0) if requested == "cuda" else torch.device(requested)


def choose_dtype(requested: str, device: torch.device) -> torch.dtype:
    """The data type asked for; `auto` is bfloat16 on a GPU and float32 on a CPU."""
    if requested == "auto":
        requested = "bfloat16" if device.type == "cuda" else "float32"
    dtype: torch.dtype = getattr(torch, requested)
    return dtype


def choose_cache_dtype(requested: str, dtype: torch.dtype) -> torch.dtype:
    """Of cached keys and values: the model's own, or eight bits."""
    return dtype if requested == "auto" else torch.float8_e4m3fn


def attention_shape(model: ModelConfig, page_size: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> AttentionShape:
    """The model's attention, as `tok_kernels.choose` wants it."""
    return AttentionShape(
        heads=model.num_heads,
        kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        page_size=page_size,
        layers=model.num_layers,
        dtype=dtype,
        cache_dtype=cache_dtype,
    )


def choose_backend(requested: str, device: torch.device, shape: AttentionShape) -> Backend:
    """The backend asked for; `auto` on a GPU: whatever is fastest there, measured the first time.

    Raises InvalidField, with the reason, where it cannot compute the shape on the device.
    """
    try:
        return choose(device, requested, shape)
    except ValueError as error:
        raise InvalidField(
            "backend", requested, str(error).partition("allowed")[2].lstrip(": ") or str(error)
        ) from None
