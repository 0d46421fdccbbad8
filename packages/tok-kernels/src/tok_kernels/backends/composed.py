"""Combine attention kernels of Triton and FlashInfer, one per phase, with the Triton backend for other operations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from tok_kernels import launch_config as config
from tok_kernels.attention.interface import PHASES, AttentionShape, Phase, PhaseKernel
from tok_kernels.attention.triton.attention import triton_decode_kernel
from tok_kernels.attention.triton.operands import unsupported_reason
from tok_kernels.backend import Backend
from tok_kernels.backends.triton import TritonBackend
from tok_kernels.batch import AttentionBatch, LayerCache
from tok_kernels.calibration.calibrate import calibrate
from tok_kernels.calibration.candidates import FLASHINFER, TRITON, Candidate, list_candidates
from tok_kernels.calibration.choice import Choice
from tok_kernels.calibration.launch_search import launch_searches


class ComposedBackend(TritonBackend):
    """The Triton backend with a chosen attention kernel for each phase.

    kernels      kernel of each attention phase
    planned      phases whose kernels are planned on the host
    cache_dtype  dtype of the KV cache that the kernels were built for

    Triton's kernels compute attention over caches of another dtype, and attention with a sliding window: they mask each
    row of a group by the row's own window.
    """

    def __init__(
        self, name: str, kernels: Mapping[Phase, PhaseKernel], planned: frozenset[Phase], cache_dtype: torch.dtype
    ) -> None:
        self.name = name
        self.needs_host_lengths = planned
        self.capturable = not planned & {"decode", "cascade"}
        self._kernels = dict(kernels)
        self._cache_dtype = cache_dtype

    def max_pack_rows(self, group: int) -> int:
        """Compute `Backend.max_pack_rows`: only Triton's kernels read packs."""
        reads_packs = all(self._kernels[phase] is triton_decode_kernel for phase in ("decode", "cascade"))
        return super().max_pack_rows(group) if reads_packs else 1

    def attention(
        self, q_THD: Tensor, cache: LayerCache, batch: AttentionBatch, scale: float, window: int | None = None
    ) -> Tensor:
        if window is not None or cache.k.dtype != self._cache_dtype:
            return super().attention(q_THD, cache, batch, scale, window)
        out = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        # No kernel writes padding rows, which come after the decode rows.
        out[batch.num_decode :].zero_()
        if batch.num_decode:
            self._kernels["cascade" if batch.levels else "decode"](q_THD, cache, batch, scale, out)
        if q_THD.shape[0] > batch.num_decode and batch.slots.shape[0] > batch.num_decode:
            self._kernels["prefill"](q_THD, cache, batch, scale, out)
        return out


def compose(device: torch.device, requested: str, shape: AttentionShape | None, directory: Path | None) -> Backend:
    """Return the backend "auto", "triton" or "flashinfer" for a CUDA device, calibrated for the shape if given.

    Raises ValueError as `tok_kernels.choose` does.
    """
    if shape is None:
        if requested == FLASHINFER:
            raise ValueError(f"shape is None; allowed with backend {requested!r}: the model's AttentionShape")
        return TritonBackend()
    reason = unsupported_reason(shape, device)  # all these backends need Triton
    if reason is not None:
        raise ValueError(f"backend is {requested!r}; allowed here: reference ({reason})")
    candidates, rejected = list_candidates(shape, device, requested)
    if not candidates:
        raise ValueError(f"backend is {requested!r}; allowed here: auto, triton, reference ({rejected[requested]})")
    if {one.name for one in candidates} == {TRITON} and not launch_searches(shape, device):
        config.override_for_card(torch.cuda.get_device_name(device))
        return TritonBackend()
    try:
        return _backend(calibrate(shape, device, candidates, directory=directory), candidates, shape.cache_dtype)
    except (ImportError, OSError, RuntimeError):
        # A kernel of the stored choice can no longer be built on this machine.
        choice = calibrate(shape, device, candidates, directory=directory, remeasure=True)
        return _backend(choice, candidates, shape.cache_dtype)


def _backend(choice: Choice, candidates: list[Candidate], cache_dtype: torch.dtype) -> Backend:
    """Build the chosen kernels, and return the backend that uses them."""
    if set(choice.fastest.values()) == {TRITON}:
        return TritonBackend()
    chosen: dict[Phase, Candidate] = {one.phase: one for one in candidates if choice.fastest[one.phase] == one.name}
    planned = frozenset(phase for phase, one in chosen.items() if one.planned)
    name = ", ".join(f"{phase}: {chosen[phase].name}" for phase in PHASES)
    return ComposedBackend(name, {phase: one.build() for phase, one in chosen.items()}, planned, cache_dtype)
