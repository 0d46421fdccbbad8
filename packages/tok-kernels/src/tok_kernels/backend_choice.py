"""Choose the backend for a device, a requested name and an attention shape."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch

from tok_kernels.attention.interface import AttentionShape
from tok_kernels.backend import Backend

HOPPER_MAJOR = 9  # compute capability 9.x
BACKENDS = ("auto", "reference", "triton", "flashinfer")


def choose(
    device: torch.device,
    requested: str = "auto",
    shape: AttentionShape | None = None,
    directory: Path | None = None,
    *,
    batch_invariant: bool = False,
) -> Backend:
    """Return the backend for `device`; `requested` is one of `BACKENDS`.

    "auto" is Triton on a CUDA device if Triton is installed, and the reference backend otherwise. If the model's
    `shape` is given, each attention phase uses the fastest of Triton's and FlashInfer's kernels. They are measured the
    first time, and the choice is stored in `directory`, by default in the user's cache directory
    (`tok_kernels.calibration.calibrate`).

    With `batch_invariant`, the bits of a row's results depend neither on other rows of a step, nor on how the sequence
    is cut into steps. The reference backend on a CPU and Triton on Hopper GPUs support this.

    Raises ValueError for other names, and for a backend that does not support the shape or the device.
    """
    if requested not in BACKENDS:
        raise ValueError(f"backend is {requested!r}; allowed: {', '.join(BACKENDS)}")
    if batch_invariant:
        return _choose_invariant(device, requested, shape)
    usable = device.type == "cuda" and find_spec("triton") is not None
    if requested == "reference" or (requested == "auto" and not usable):
        from tok_kernels.backends.reference import ReferenceBackend

        return ReferenceBackend()
    if not usable:
        raise ValueError(f"backend is {requested!r}; allowed on {device.type} here: reference")
    from tok_kernels.backends.composed import compose

    return compose(device, requested, shape, directory)


def _choose_invariant(device: torch.device, requested: str, shape: AttentionShape | None) -> Backend:
    if device.type == "cpu" and requested in ("auto", "reference"):
        from tok_kernels.backends.reference import InvariantReferenceBackend

        return InvariantReferenceBackend()
    refused = f"backend is {requested!r} on {device.type}; allowed with batch_invariant"
    if device.type == "cpu" or requested not in ("auto", "triton") or find_spec("triton") is None:
        raise ValueError(f"{refused}: reference on cpu, triton on cuda")
    if torch.cuda.get_device_capability(device)[0] != HOPPER_MAJOR:
        raise ValueError(f"{refused}: reference on cpu, triton on GPUs of compute capability 9")
    from tok_kernels.attention.triton.invariant import not_invariant_reason
    from tok_kernels.attention.triton.operands import unsupported_reason
    from tok_kernels.backends.triton import InvariantTritonBackend

    reason = None if shape is None else unsupported_reason(shape, device) or not_invariant_reason(shape)
    if reason is not None:
        raise ValueError(f"{refused}: reference on cpu ({reason})")
    return InvariantTritonBackend()
