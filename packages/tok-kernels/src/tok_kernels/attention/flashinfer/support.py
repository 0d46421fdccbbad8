"""Check whether FlashInfer is installed, and which shapes it computes."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch

from tok_kernels.attention.shape import AttentionShape

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)


def flashinfer() -> ModuleType:
    """Import the package at first use and return it; loading takes seconds.

    Raises ImportError if it is not installed.
    """
    return import_module("flashinfer")


def unusable(shape: AttentionShape, device: torch.device) -> str | None:
    """Return why FlashInfer cannot compute this shape here; None if it can, as far as known without a build."""
    if device.type != "cuda":
        return f"FlashInfer does not run on {device.type}"
    if find_spec("flashinfer") is None:
        return "the package flashinfer-python is not installed"
    cache_dtypes = (shape.dtype, torch.float8_e4m3fn)
    for name, value, allowed in (
        ("head_dim", shape.head_dim, HEAD_DIMS),
        ("dtype", shape.dtype, DTYPES),
        ("cache_dtype", shape.cache_dtype, cache_dtypes),
    ):
        if value not in allowed:
            return f"{name} is {value}; FlashInfer's kernels allow {', '.join(map(str, allowed))}"
    return None


def has_fa3(shape: AttentionShape, device: torch.device) -> bool:
    """Return whether the Hopper kernels ("FlashAttention-3", Shah et al. 2024) compute this shape on this device."""
    return torch.cuda.get_device_capability(device)[0] == 9 and shape.cache_dtype == shape.dtype
