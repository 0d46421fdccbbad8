"""Define the phases of attention; each may be computed by kernels of another origin."""

from __future__ import annotations

from typing import Literal, Protocol

from torch import Tensor

from tok_kernels.batch import AttentionBatch, LayerCache

Phase = Literal["prefill", "decode", "cascade"]

PHASES: tuple[Phase, ...] = ("prefill", "decode", "cascade")


class PhaseKernel(Protocol):
    """A kernel, or sequence of kernels, that computes one phase of a step.

    "prefill" writes the outputs of all sequences after the first `num_decode`. "decode" writes those of the first
    `num_decode` rows in a step without cascade levels, "cascade" in a step with levels. Rows that belong to no sequence
    stay unchanged. `out_THD` is contiguous, of q's shape and dtype.
    """

    def __call__(
        self, q_THD: Tensor, cache: LayerCache, batch: AttentionBatch, scale: float, out_THD: Tensor, /
    ) -> None: ...
