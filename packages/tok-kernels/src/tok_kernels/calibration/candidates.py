"""List the kernels that can compute each attention phase of a shape on a device: the candidates of calibration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tok_kernels.attention.flashinfer import Adapters, has_fa3, unsupported_reason
from tok_kernels.attention.interface import AttentionShape, Phase, PhaseKernel
from tok_kernels.attention.triton.attention import triton_decode_kernel, triton_prefill_kernel

TRITON, FLASHINFER = "triton", "flashinfer"

# Query heads per key/value head (GQA group sizes) for which kernels without tensor cores may be faster.
_SMALL_GROUPS = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel that can compute an attention phase.

    phase    attention phase
    name     name within the phase, such as "flashinfer fa3"
    planned  the kernel is planned on the host once per step, so no CUDA graph can capture it
    build    returns the kernel; may take seconds, and raises any error if the kernel cannot be built
    """

    phase: Phase
    name: str
    planned: bool
    build: Callable[[], PhaseKernel]

    @property
    def hides_host_time(self) -> bool:
        """Whether host time is no part of the kernel's cost.

        A CUDA graph removes the launches of kernels that it captures. In prefill, the GEMMs of thousands of tokens
        keep the device busy meanwhile.
        """
        return not self.planned or self.phase == "prefill"


def list_candidates(
    shape: AttentionShape, device: torch.device, backend: str = "auto"
) -> tuple[list[Candidate], dict[str, str]]:
    """Return the candidates of `backend` ("auto": all backends), and the reasons why backends have none.

    The first candidate of a phase is the default, which others must beat by a margin.
    """
    found = _triton_candidates() if backend != FLASHINFER else []
    if backend == TRITON:
        return found, {}
    reason = unsupported_reason(shape, device)
    if reason is not None:
        return found, {FLASHINFER: reason}
    return [*found, *_flashinfer_candidates(shape, device)], {}


def _triton_candidates() -> list[Candidate]:
    return [
        Candidate("prefill", TRITON, False, lambda: triton_prefill_kernel),
        Candidate("decode", TRITON, False, lambda: triton_decode_kernel),
        Candidate("cascade", TRITON, False, lambda: triton_decode_kernel),
    ]


def _flashinfer_candidates(shape: AttentionShape, device: torch.device) -> list[Candidate]:
    adapters = Adapters(shape, device)
    found = [
        Candidate("decode", f"{FLASHINFER} tensor cores", True, lambda: adapters.decode(tensor_cores=True)),
        Candidate("prefill", f"{FLASHINFER} fa2", True, lambda: adapters.prefill("fa2")),
        Candidate("cascade", f"{FLASHINFER} fa2", True, lambda: adapters.cascade("fa2")),
    ]
    if shape.group in _SMALL_GROUPS:
        found.append(Candidate("decode", FLASHINFER, True, lambda: adapters.decode(tensor_cores=False)))
    if has_fa3(shape, device):
        found.append(Candidate("prefill", f"{FLASHINFER} fa3", True, lambda: adapters.prefill("fa3")))
        found.append(Candidate("cascade", f"{FLASHINFER} fa3", True, lambda: adapters.cascade("fa3")))
    return found
