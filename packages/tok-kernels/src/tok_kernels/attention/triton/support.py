"""Check a model's shape against the limits of the Triton kernels, before any launch."""

from __future__ import annotations

import torch

from tok_kernels.attention.shape import AttentionShape
from tok_kernels.attention.triton.operands import DTYPES, MAX_HEAD_DIM, has_fp8


def unusable(shape: AttentionShape, device: torch.device) -> str | None:
    """Return why Triton's kernels cannot compute this shape here; None if they can."""
    if shape.head_dim > MAX_HEAD_DIM:
        return f"head_dim is {shape.head_dim}; Triton's kernels allow at most {MAX_HEAD_DIM}"
    if shape.page_size & (shape.page_size - 1):
        return f"page_size is {shape.page_size}; Triton's kernels allow powers of two"
    if shape.dtype not in DTYPES:
        return f"dtype is {shape.dtype}; Triton's kernels allow {', '.join(map(str, DTYPES))}"
    if shape.cache_dtype == torch.float8_e4m3fn and not has_fp8(device):
        return f"cache_dtype is {shape.cache_dtype}; Triton's kernels allow it from compute capability 8.9 on"
    return None
