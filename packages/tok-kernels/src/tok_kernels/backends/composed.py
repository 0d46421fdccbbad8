"""Combine attention kernels of Triton and FlashInfer, one per phase, with Triton's kernels for all other operations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from tok_kernels import launch_config as config
from tok_kernels.attention.interface import PHASES, AttentionShape, Phase, PhaseKernel
from tok_kernels.attention.triton.operands import unusable
from tok_kernels.backend import Backend
from tok_kernels.backends.triton import TritonBackend
from tok_kernels.batch import AttentionBatch, LayerCache
from tok_kernels.calibration.calibrate import calibrate
from tok_kernels.calibration.candidates import FLASHINFER, TRITON, Candidate, candidates
from tok_kernels.calibration.choice import Choice
from tok_kernels.calibration.launches import searches


class ComposedBackend(TritonBackend):
    """A `tok_kernels.Backend` with one attention kernel per phase; the phases `planned` are planned on the host.

    Triton computes all other operations. Triton also computes attention with a sliding window, because its kernels mask
    each row of a group by the row's own window. It also computes attention over a cache whose dtype is not
    `cache_dtype`, for which the kernels were built.
    """

    def __init__(
        self, name: str, kernels: Mapping[Phase, PhaseKernel], planned: frozenset[Phase], cache_dtype: torch.dtype
    ) -> None:
        self.name = name
        self.needs_host_lengths = planned
        self.capturable = not planned & {"decode", "cascade"}
        self._kernels = dict(kernels)
        self._cache_dtype = cache_dtype

    def attention(
        self, q_THD: Tensor, cache: LayerCache, batch: AttentionBatch, scale: float, window: int | None = None
    ) -> Tensor:
        if window is not None or cache.k.dtype != self._cache_dtype:
            return super().attention(q_THD, cache, batch, scale, window)
        out = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        # Rows that no kernel writes are padding; they come after the decode rows.
        out[batch.num_decode :].zero_()
        if batch.num_decode:
            self._kernels["cascade" if batch.levels else "decode"](q_THD, cache, batch, scale, out)
        if q_THD.shape[0] > batch.num_decode and batch.slots.shape[0] > batch.num_decode:
            self._kernels["prefill"](q_THD, cache, batch, scale, out)
        return out


def compose(device: torch.device, requested: str, shape: AttentionShape | None, directory: Path | None) -> Backend:
    """Return the backend "auto", "triton" or "flashinfer" on a CUDA device. Raises ValueError as `choose` does."""
    if shape is None:
        if requested == FLASHINFER:
            raise ValueError(f"shape is None; allowed with backend {requested!r}: the model's AttentionShape")
        return TritonBackend()
    reason = unusable(shape, device)  # every backend but the reference needs Triton
    if reason is not None:
        raise ValueError(f"backend is {requested!r}; allowed here: reference ({reason})")
    among, left_out = candidates(shape, device, requested)
    if not among:
        raise ValueError(f"backend is {requested!r}; allowed here: auto, triton, reference ({left_out[requested]})")
    if {one.name for one in among} == {TRITON} and not searches(shape, device):
        config.use_card(torch.cuda.get_device_name(device))
        return TritonBackend()
    try:
        return _backend(calibrate(shape, device, among, directory=directory), among, shape.cache_dtype)
    except (ImportError, OSError, RuntimeError):
        # The stored choice can no longer be built on this machine: measure again.
        return _backend(calibrate(shape, device, among, directory=directory, anew=True), among, shape.cache_dtype)


def _backend(choice: Choice, among: list[Candidate], cache_dtype: torch.dtype) -> Backend:
    if set(choice.fastest.values()) == {TRITON}:
        return TritonBackend()
    chosen: dict[Phase, Candidate] = {one.phase: one for one in among if choice.fastest[one.phase] == one.name}
    planned = frozenset(phase for phase, one in chosen.items() if one.planned)
    name = ", ".join(f"{phase}: {chosen[phase].name}" for phase in PHASES)
    return ComposedBackend(name, {phase: one.make() for phase, one in chosen.items()}, planned, cache_dtype)
