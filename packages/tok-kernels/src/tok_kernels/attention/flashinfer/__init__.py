"""Adapt FlashInfer's attention kernels (Ye et al. 2025), one adapter per phase.

Triton computes sampling, for three reasons. FlashInfer derives a row's random numbers from the first seed and the row's
index in the batch, so a request's tokens would change with its neighbours. FlashInfer needs float32 logits or
probabilities, so logits would be read and written several times. FlashInfer returns no log-probability.
"""

from __future__ import annotations

from tok_kernels.attention.flashinfer.adapters import Adapters, has_fa3, unsupported_reason

__all__ = ["Adapters", "has_fa3", "unsupported_reason"]
