"""The Triton backend's kernels: no CPU plan, no synchronisation, usable inside CUDA graphs."""

from __future__ import annotations

from tok_kernels.attention.triton.attention import attention

__all__ = ["attention"]
