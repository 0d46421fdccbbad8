"""List the candidates of a shape: the kernels that may compute each attention phase on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tok_kernels.attention.flashinfer import Adapters, has_fa3, unusable
from tok_kernels.attention.interface import AttentionShape, Phase, PhaseKernel
from tok_kernels.attention.triton.attention import triton_decode_kernel, triton_prefill_kernel

TRITON, FLASHINFER = "triton", "flashinfer"

# Query heads per key/value head for which kernels without tensor cores may be faster.
_NARROW_GROUPS = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel that may compute `phase`.

    A `planned` kernel is planned on the host once per step, so no CUDA graph can capture it. `make` builds the kernel,
    which may take seconds; it raises an error if the kernel cannot be built.
    """

    phase: Phase
    name: str
    planned: bool
    make: Callable[[], PhaseKernel]

    @property
    def hidden(self) -> bool:
        """Whether the kernel's host time is hidden, and so not part of its cost.

        A CUDA graph hides the host time of kernels that it captures. In prefill, the GEMMs of thousands of tokens hide
        the host's work.
        """
        return not self.planned or self.phase == "prefill"


def candidates(
    shape: AttentionShape, device: torch.device, backend: str = "auto"
) -> tuple[list[Candidate], dict[str, str]]:
    """Return the candidates of `backend` ("auto": all), and the reasons why other backends have none.

    The first candidate of a phase is the one that others must beat by a margin.
    """
    found = _of_triton() if backend != FLASHINFER else []
    if backend == TRITON:
        return found, {}
    reason = unusable(shape, device)
    if reason is not None:
        return found, {FLASHINFER: reason}
    return [*found, *_of_flashinfer(shape, device)], {}


def _of_triton() -> list[Candidate]:
    return [
        Candidate("prefill", TRITON, False, lambda: triton_prefill_kernel),
        Candidate("decode", TRITON, False, lambda: triton_decode_kernel),
        Candidate("cascade", TRITON, False, lambda: triton_decode_kernel),
    ]


def _of_flashinfer(shape: AttentionShape, device: torch.device) -> list[Candidate]:
    adapters = Adapters(shape, device)
    found = [
        Candidate("decode", f"{FLASHINFER} tensor cores", True, lambda: adapters.decode(tensor_cores=True)),
        Candidate("prefill", f"{FLASHINFER} fa2", True, lambda: adapters.prefill("fa2")),
        Candidate("cascade", f"{FLASHINFER} fa2", True, lambda: adapters.cascade("fa2")),
    ]
    if shape.group in _NARROW_GROUPS:
        found.append(Candidate("decode", FLASHINFER, True, lambda: adapters.decode(tensor_cores=False)))
    if has_fa3(shape, device):
        found.append(Candidate("prefill", f"{FLASHINFER} fa3", True, lambda: adapters.prefill("fa3")))
        found.append(Candidate("cascade", f"{FLASHINFER} fa3", True, lambda: adapters.cascade("fa3")))
    return found
