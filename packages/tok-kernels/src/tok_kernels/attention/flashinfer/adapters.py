"""Create FlashInfer kernels for the phases of one attention shape, and check which shapes FlashInfer supports."""

from __future__ import annotations

from functools import cached_property
from importlib.util import find_spec

import torch
from torch import Tensor

from tok_kernels.attention.flashinfer.cascade import FlashInferCascade
from tok_kernels.attention.flashinfer.decode import FlashInferDecode
from tok_kernels.attention.flashinfer.prefill import FlashInferPrefill, PrefillBackend
from tok_kernels.attention.flashinfer.wrappers import new_workspace
from tok_kernels.attention.interface import AttentionShape, PhaseKernel

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)


class Adapters:
    """Factory of the FlashInfer kernels of `shape` on `device`.

    The kernels share one workspace, so they must run on one stream. A factory method builds or loads the kernel's code,
    and raises FlashInfer's errors if that fails.
    """

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        self._shape = shape
        self._device = device

    @cached_property
    def _workspace(self) -> Tensor:
        return new_workspace(self._shape, self._device)

    def prefill(self, backend: PrefillBackend) -> PhaseKernel:
        """Return the kernel of the phase "prefill"."""
        return FlashInferPrefill(self._shape, self._device, self._workspace, backend)

    def decode(self, *, tensor_cores: bool) -> PhaseKernel:
        """Return the kernel of the phase "decode"."""
        return FlashInferDecode(self._shape, self._device, self._workspace, tensor_cores=tensor_cores)

    def cascade(self, backend: PrefillBackend) -> PhaseKernel:
        """Return the kernel of the phase "cascade"; `backend` computes the shared prefixes."""
        return FlashInferCascade(self._shape, self._device, self._workspace, backend)


def unsupported_reason(shape: AttentionShape, device: torch.device) -> str | None:
    """Return why FlashInfer does not support this shape here; None if it does, or if only a build of it can tell."""
    if device.type != "cuda":
        return f"FlashInfer does not run on {device.type}"
    if find_spec("flashinfer") is None:
        return "the package flashinfer-python is not installed"
    cache_dtypes = (shape.dtype, torch.float8_e4m3fn)
    for name, value, allowed in (
        ("head_dim", shape.head_dim, HEAD_DIMS),
        ("dtype", shape.dtype, DTYPES),
        ("cache_dtype", shape.cache_dtype, cache_dtypes),
    ):
        if value not in allowed:
            return f"{name} is {value}; FlashInfer's kernels allow {', '.join(map(str, allowed))}"
    return None


def has_fa3(shape: AttentionShape, device: torch.device) -> bool:
    """Return whether FlashInfer's FlashAttention-3 kernels (Shah et al. 2024) support this shape on this device."""
    return torch.cuda.get_device_capability(device)[0] == 9 and shape.cache_dtype == shape.dtype
