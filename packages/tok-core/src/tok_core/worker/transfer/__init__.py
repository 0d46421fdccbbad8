"""Receive weights from a trainer: by broadcasts in a process group, or from its memory on the same GPU (CUDA IPC)."""

from __future__ import annotations

from tok_core.worker.transfer.cuda_ipc import export_tensors
from tok_core.worker.transfer.receiver import WeightReceiver

__all__ = ["WeightReceiver", "export_tensors"]
