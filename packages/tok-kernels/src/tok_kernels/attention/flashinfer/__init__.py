"""Adapt FlashInfer's attention kernels (Ye et al. 2025), one adapter per phase.

Sampling stays with Triton. FlashInfer derives a row's random numbers from the first of its seeds and the row's index in
the batch. A request's tokens would thus change with its neighbours. FlashInfer needs float32 logits or probabilities,
so the logits are read and written several times, and it returns no log-probability. Its top-k and top-p filters of
probabilities would help only rows that use them, at the price of a float32 copy of these rows.
"""

from __future__ import annotations

from tok_kernels.attention.flashinfer.adapters import Adapters, has_fa3, unusable

__all__ = ["Adapters", "has_fa3", "unusable"]
