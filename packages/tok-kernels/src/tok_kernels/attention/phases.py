"""The phases of attention, each of which may be computed by kernels of another origin."""

from __future__ import annotations

from typing import Literal, Protocol

from torch import Tensor

from tok_kernels.batch import AttentionBatch, LayerCache

Phase = Literal["prefill", "decode", "cascade"]

PHASES: tuple[Phase, ...] = ("prefill", "decode", "cascade")


class PhaseKernel(Protocol):
    """One way to compute a phase.

    "prefill" writes the outputs of all sequences after the first `num_decode`, "decode" those of the first
    `num_decode` rows where the step has no cascade levels, "cascade" where it has some. Rows that no sequence owns
    stay as they are. `out_THD` is contiguous, of q's shape and dtype.
    """

    def __call__(
        self, q_THD: Tensor, cache: LayerCache, batch: AttentionBatch, scale: float, out_THD: Tensor, /
    ) -> None: ...
