"""WorkerState: what the device remembers between steps — per slot, per page — and the KV cache.

Legend: S slots, P pages a slot may hold, L layers, K key/value heads, D head size, E bias entries a slot.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tok_core.messages import NewSlots, StepInput
from tok_core.model.config import ModelConfig
from tok_kernels import LayerCache


def kv_bytes_per_token(model: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that one position takes in the cache of all layers, its token id included."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * dtype.itemsize + 4


class WorkerState:
    """Tensors on the device, changed by each step's deltas and by the forward itself, never rebuilt.

    token_of   int64 [num_pages × page_size]  the token whose key and value stand at each cache row
    last_token int64 [S]                      what a decode row feeds next; written by the sampler
    length     int64 [S]                      positions in the cache
    """

    def __init__(
        self,
        model: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        *,
        slots: int,
        num_pages: int,
        page_size: int,
        pages_per_slot: int,
    ) -> None:
        self.device = device
        self.page_size = page_size
        shape = (model.num_layers, 2, num_pages, page_size, model.num_kv_heads, model.head_dim)
        self.kv = torch.zeros(shape, dtype=dtype, device=device)
        self.caches = [LayerCache(layer[0], layer[1]) for layer in self.kv]
        self.token_of = torch.zeros(num_pages * page_size, dtype=torch.int64, device=device)
        self.page_table = torch.zeros((slots, pages_per_slot), dtype=torch.int32, device=device)
        self.last_token = self._column(slots, torch.int64)
        self.length = self._column(slots, torch.int64)
        self.prompt_len = self._column(slots, torch.int64)
        self.seed = self._column(slots, torch.int64)
        self.sample = self._column(slots, torch.int64)
        self.temperature = self._column(slots, torch.float32)
        self.top_k = self._column(slots, torch.int32)
        self.top_p = self._column(slots, torch.float32)
        self.min_p = self._column(slots, torch.float32)
        self.presence = self._column(slots, torch.float32)
        self.frequency = self._column(slots, torch.float32)
        self.repetition = self._column(slots, torch.float32)
        # The bias table appears, and widens, with the first requests that need it.
        self.bias_token = torch.zeros((slots, 0), dtype=torch.int64, device=device)
        self.bias_value = torch.zeros((slots, 0), dtype=torch.float32, device=device)
        self.bias_until = torch.zeros((slots, 0), dtype=torch.int64, device=device)

    def _column(self, slots: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(slots, dtype=dtype, device=self.device)

    def put(self, values: np.ndarray, dtype: torch.dtype) -> Tensor:
        """Host values on the device, without waiting for it."""
        host = torch.from_numpy(np.array(values)).to(dtype)
        if self.device.type == "cuda":
            return host.pin_memory().to(self.device, non_blocking=True)
        return host

    def apply(self, step: StepInput) -> None:
        """Takes over what the step changes: new slots, page table entries."""
        if step.new is not None:
            self._set_slots(step.new)
        if len(step.page_slot):
            slot, index = self.put(step.page_slot, torch.int64), self.put(step.page_index, torch.int64)
            self.page_table[slot, index] = self.put(step.page_id, torch.int32)

    def copy_pages(self, step: StepInput) -> None:
        """Copies the last, partly filled page of a prompt to the samples that fork from it."""
        if not len(step.copy_src):
            return
        source, target = self.put(step.copy_src, torch.int64), self.put(step.copy_dst, torch.int64)
        for layer in self.kv:  # by layer: the gathered pages are a temporary
            layer[:, target] = layer[:, source]
        tokens = self.token_of.view(-1, self.page_size)
        tokens[target] = tokens[source]

    def _set_slots(self, new: NewSlots) -> None:
        slot = self.put(new.slot, torch.int64)
        for name in _COLUMNS:
            column: Tensor = getattr(self, name)
            column[slot] = self.put(getattr(new, name), column.dtype)
        if len(new.bias_slot) or self.bias_token.shape[1]:
            self._set_biases(slot, new)

    def _set_biases(self, slot: Tensor, new: NewSlots) -> None:
        """Entries of a slot fill its row from the left; `until` 0 marks the rest as unused."""
        _, first, owner, counts = np.unique(new.bias_slot, return_index=True, return_inverse=True, return_counts=True)
        self._widen_biases(int(counts.max(initial=0)))
        self.bias_until[slot] = 0
        place = np.arange(len(new.bias_slot)) - first[owner]  # a slot's entries stand together
        row, column = self.put(new.bias_slot, torch.int64), self.put(place, torch.int64)
        self.bias_token[row, column] = self.put(new.bias_token, torch.int64)
        self.bias_value[row, column] = self.put(new.bias_value, torch.float32)
        self.bias_until[row, column] = self.put(new.bias_until, torch.int64)

    def _widen_biases(self, width: int) -> None:
        more = width - self.bias_token.shape[1]
        if more > 0:
            for name in ("bias_token", "bias_value", "bias_until"):
                table: Tensor = getattr(self, name)
                setattr(self, name, torch.nn.functional.pad(table, (0, more)))


_COLUMNS = (
    "length",
    "prompt_len",
    "seed",
    "sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence",
    "frequency",
    "repetition",
)
