"""Attention kernels of the Triton backend: no planning on the CPU, no synchronisation, usable inside CUDA graphs."""

from __future__ import annotations

from tok_kernels.attention.triton.attention import attention

__all__ = ["attention"]
