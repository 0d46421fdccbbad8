"""Compute attention by Triton kernels; nothing is planned on the CPU or synchronised, so CUDA graphs can capture it."""

from __future__ import annotations

from tok_kernels.attention.triton.attention import attention

__all__ = ["attention"]
