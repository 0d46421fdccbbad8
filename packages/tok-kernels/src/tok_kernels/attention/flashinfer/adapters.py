"""Create FlashInfer's kernels of each phase for one shape; all share one workspace."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from tok_kernels.attention.flashinfer.cascade import FlashInferCascade
from tok_kernels.attention.flashinfer.decode import FlashInferDecode
from tok_kernels.attention.flashinfer.prefill import FlashInferPrefill, PrefillBackend
from tok_kernels.attention.flashinfer.wrappers import new_workspace
from tok_kernels.attention.phases import PhaseKernel
from tok_kernels.attention.shape import AttentionShape


class Adapters:
    """Factory of the FlashInfer kernels of `shape` on `device`; all of them must run on one CUDA stream."""

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        self._shape = shape
        self._device = device

    @cached_property
    def _workspace(self) -> Tensor:
        return new_workspace(self._shape, self._device)

    def prefill(self, kernels: PrefillBackend) -> PhaseKernel:
        return FlashInferPrefill(self._shape, self._device, self._workspace, kernels)

    def decode(self, *, tensor_cores: bool) -> PhaseKernel:
        return FlashInferDecode(self._shape, self._device, self._workspace, tensor_cores=tensor_cores)

    def cascade(self, kernels: PrefillBackend, *, tensor_cores: bool) -> PhaseKernel:
        return FlashInferCascade(self._shape, self._device, self._workspace, kernels, tensor_cores=tensor_cores)
