"""The Triton backend's kernels: no CPU plan, no synchronisation, usable inside CUDA graphs."""

from __future__ import annotations

from tok_kernels.triton.attention import attention

__all__ = ["attention"]
