"""Thin adapters to FlashInfer's kernels (Ye et al. 2025), one for each phase of attention.

Sampling stays with Triton. FlashInfer draws a row from the first of its seeds and the row's place in the batch, so that
a request's tokens would change with its neighbours; it wants float32 logits or probabilities, so that the logits are
read and written several times; and it returns no log-probability. Its top-k and top-p filters of probabilities would
help only rows that ask for them, at the price of a float32 copy of those.
"""

from __future__ import annotations

from tok_kernels.attention.flashinfer.adapters import Adapters
from tok_kernels.attention.flashinfer.support import has_fa3, unusable

__all__ = ["Adapters", "has_fa3", "unusable"]
