"""Make the requested backend for a device: Triton alone, or the fastest kernel for each phase."""

from __future__ import annotations

from pathlib import Path

import torch

from tok_kernels.attention.phases import PHASES, Phase
from tok_kernels.attention.shape import AttentionShape
from tok_kernels.attention.triton.support import unusable
from tok_kernels.backend import Backend
from tok_kernels.backends.composed import ComposedBackend
from tok_kernels.backends.triton import TritonBackend
from tok_kernels.calibration.calibrate import calibrate
from tok_kernels.calibration.candidates import FLASHINFER, TRITON, Candidate, candidates
from tok_kernels.calibration.choice import Choice
from tok_kernels.calibration.launches import searches


def compose(device: torch.device, requested: str, shape: AttentionShape | None, directory: Path | None) -> Backend:
    """Return the backend "auto", "triton" or "flashinfer" on a CUDA device. Raises ValueError as `choose`."""
    if shape is None:
        if requested == FLASHINFER:
            raise ValueError(f"shape is None; allowed with backend {requested!r}: the model's AttentionShape")
        return TritonBackend()
    reason = unusable(shape, device)  # Triton computes all operations but attention in any case
    if reason is not None:
        raise ValueError(f"backend is {requested!r}; allowed here: reference ({reason})")
    among, left_out = candidates(shape, device, requested)
    if not among:
        raise ValueError(f"backend is {requested!r}; allowed here: auto, triton, reference ({left_out[requested]})")
    if {one.name for one in among} == {TRITON} and not searches(shape, device):
        return TritonBackend()
    try:
        return _backend(calibrate(shape, device, among, directory=directory), among, shape.cache_dtype)
    except (ImportError, OSError, RuntimeError):
        # The stored choice can no longer be built here.
        return _backend(calibrate(shape, device, among, directory=directory, anew=True), among, shape.cache_dtype)


def _backend(choice: Choice, among: list[Candidate], cache_dtype: torch.dtype) -> Backend:
    if set(choice.fastest.values()) == {TRITON}:
        return TritonBackend()
    chosen: dict[Phase, Candidate] = {one.phase: one for one in among if choice.fastest[one.phase] == one.name}
    planned = frozenset(phase for phase, one in chosen.items() if one.planned)
    name = ", ".join(f"{phase}: {chosen[phase].name}" for phase in PHASES)
    return ComposedBackend(name, {phase: one.make() for phase, one in chosen.items()}, planned, cache_dtype)
