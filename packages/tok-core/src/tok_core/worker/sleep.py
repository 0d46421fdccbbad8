"""SleepingMemory: the memory of a worker that is released while the engine sleeps."""

from __future__ import annotations

import torch

from tok_core.errors import EngineError
from tok_core.messages import MemoryTask, TaskResult
from tok_core.runtime import HEARTBEAT
from tok_core.worker.cuda_graphs import DecodeGraphs
from tok_core.worker.memory_region import MemoryRegion


class SleepingMemory:
    """Weights and KV cache of a worker. The tag "kv_cache" includes PyTorch's allocator cache for activations.

    CUDA graphs, communicators and per-slot tables keep their memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.weights = MemoryRegion(device)
        self.kv_cache = MemoryRegion(device)
        self._device = device
        self._step_bytes = 0  # released from PyTorch's allocator

    def execute(self, task: MemoryTask, graphs: DecodeGraphs) -> TaskResult:
        """Release or restore memory while no step is in flight.

        After an error some of the tags may have been released or restored: the engine undoes the operation everywhere.
        """
        try:
            with HEARTBEAT.coarse():  # page-locking host memory takes seconds
                try:
                    if task.action == "sleep":
                        self._release(task)
                    else:
                        self._restore(task)
                finally:  # an idle worker captures no graph while a part is released
                    graphs.suspend(self.weights.released or self.kv_cache.released)
        except (EngineError, torch.OutOfMemoryError) as error:
            return TaskResult(f"{task.action}: {error}")
        return TaskResult()

    def _release(self, task: MemoryTask) -> None:
        if "weights" in task.tags:
            self.weights.release(keep=task.keep)
        if "kv_cache" in task.tags and not self.kv_cache.released:
            self.kv_cache.release(keep=False)
            self._step_bytes = self._empty_cache()

    def _restore(self, task: MemoryTask) -> None:
        self._empty_cache()
        if "weights" in task.tags:
            self.weights.restore()
        if "kv_cache" in task.tags and self.kv_cache.released:
            self.kv_cache.restore()
            if self._step_bytes:  # allocate one block and free it, as the warm-up does
                torch.empty(self._step_bytes, dtype=torch.uint8, device=self._device)

    def _empty_cache(self) -> int:
        """Release the unused memory of PyTorch's allocator to the driver, and return its bytes."""
        if self._device.type != "cuda":
            return 0
        before = torch.cuda.memory_reserved(self._device)
        torch.cuda.empty_cache()
        return before - torch.cuda.memory_reserved(self._device)
