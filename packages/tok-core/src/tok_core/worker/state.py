"""Hold the state that the device keeps between steps: per-slot columns, page tables and the KV cache.

Legend: S slots, P pages per slot, E bias entries per slot. The first F bias entries may depend on a prefix of up to K
generated tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from tok_core.messages import NewSlots, StepInput
from tok_core.model_config import ModelConfig
from tok_core.sampling_params import DEVICE_COLUMNS
from tok_core.worker.memory_region import MemoryRegion
from tok_kernels import LayerCache, SlotColumns, kv_position_bytes

MAX_COPY_BYTES = 32 << 20  # bytes gathered at once to copy pages; at least one position of each page


def kv_bytes_per_token(model: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes of one position in the cache of all layers, its token id included."""
    return model.num_layers * kv_position_bytes(model.num_kv_heads, model.head_dim, dtype) + 8


def page_table_bytes(slots: int, max_len: int, page_size: int) -> int:
    """Return the bytes of the page tables of `slots`, for `max_len` positions each."""
    return 4 * (slots + 1) * -(-max_len // page_size)


class WorkerState:
    """Persistent tensors on the device, updated by each step's deltas and by the forward pass.

    `columns` have S = `slots` + 1 entries: the last slot never holds a sequence and stands for padding rows. Likewise
    no sequence owns the last page of the cache: padding rows and ended slots write there. `scales` are those of cached
    keys and values, float32 `[layers, 2, K]`; None: the cache holds them as they are. An int8 cache has a scale for
    each position in `token_scales`, float32 `[layers, 2, pages, K, page_size]`. `hidden` has a hidden state for each
    position that a draft head reads, `[pages, page_size, N]`; None: there is no such head. `processed_logprobs` is
    `SamplingBatch.processed` of every step. `memory` is that of the KV cache; None: PyTorch's.
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
        scales: Tensor | None = None,
        processed_logprobs: bool = False,
        memory: MemoryRegion | None = None,
    ) -> None:
        self.device = device
        self.processed_logprobs = processed_logprobs
        self.slots = slots
        self.num_pages = num_pages
        self.page_size = page_size
        self._memory = memory
        layers, heads = (model.num_layers, 2, num_pages + 1), model.num_kv_heads
        self.kv = self.cache((*layers, page_size, heads, model.head_dim), dtype)
        self.token_scales = None
        if dtype == torch.int8:
            self.token_scales = self.cache((*layers, heads, page_size), torch.float32)
        unscaled = [(None, None)] * model.num_layers
        self.hidden: Tensor | None = None
        head_scales = unscaled if scales is None else scales
        token_scales = unscaled if self.token_scales is None else self.token_scales
        self.caches = [
            LayerCache(*kv, *of_heads, *of_tokens)
            for kv, of_heads, of_tokens in zip(self.kv, head_scales, token_scales, strict=True)
        ]
        # Columns of one dtype are rows of one tensor, so that one operation writes the slots of all of them.
        self._packed = {dtype: self._pack(getattr(torch, dtype), len(rows)) for dtype, rows in _COLUMNS.items()}
        columns: dict[str, Tensor] = {}
        for kind, names in _COLUMNS.items():
            columns.update(zip(names, self._packed[kind], strict=True))
        # One gather reads all that a row's random numbers depend on.
        self.random_keys = self._packed["int64"][: len(_RANDOM_KEYS)]
        self.columns = SlotColumns(
            last_token=columns["last_token"],
            length=columns["length"],
            ended=columns["ended"],
            eos_from_position=columns["eos_from_position"],
            page_table=torch.zeros((slots + 1, pages_per_slot), dtype=torch.int32, device=device),
            token_of=torch.zeros((num_pages + 1) * page_size, dtype=torch.int64, device=device),
            end_ids=torch.tensor(model.eos_token_ids, dtype=torch.int64, device=device),
            page_size=page_size,
            scratch=num_pages * page_size,
        )
        self.columns.ended[slots] = 1
        self.prompt_len = columns["prompt_len"]
        self.sampling = {name: columns[name] for name in DEVICE_COLUMNS}
        # The bias table is empty until requests need it, and widens as they do.
        self.bias_token = torch.zeros((slots, 0), dtype=torch.int64, device=device)
        self.bias_value = torch.zeros((slots, 0), dtype=torch.float32, device=device)
        self.bias_until = torch.zeros((slots, 0), dtype=torch.int64, device=device)
        # Generated tokens [S, F, K] that have to precede, the last one first; −1: any token.
        self.bias_prefix = torch.zeros((slots, 0, 0), dtype=torch.int64, device=device)

    @property
    def max_len(self) -> int:
        """Return how many positions the page table of a slot covers."""
        return self.columns.page_table.shape[1] * self.page_size

    def cache(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate zeros in the memory of the KV cache."""
        if self._memory is None:
            return torch.zeros(shape, dtype=dtype, device=self.device)
        return self._memory.zeros(shape, dtype)

    def add_hidden(self, hidden_size: int, dtype: torch.dtype) -> Tensor:
        """Allocate `hidden`, and return it."""
        self.hidden = self.cache((self.num_pages + 1, self.page_size, hidden_size), dtype)
        return self.hidden

    def _pack(self, dtype: torch.dtype, columns: int) -> Tensor:
        """Allocate columns as rows of one tensor, aligned as if each were allocated alone."""
        width = -(-(self.slots + 1) // _COLUMN_ALIGNMENT) * _COLUMN_ALIGNMENT
        return torch.zeros((columns, width), dtype=dtype, device=self.device)[:, : self.slots + 1]

    def apply(self, step: StepInput, put: Mapping[str, Tensor]) -> None:
        """Apply the step's changes; `put` holds the arrays of `changes(step)` on the device."""
        if step.new is not None:
            self._set_slots(step.new, put)
        for i, shared in enumerate(step.shared):
            self.columns.page_table[put[f"shared_slot_{i}"].long(), : len(shared.page)] = put[f"shared_page_{i}"]
        if len(step.page_slot):
            self.columns.page_table[put["page_slot"], put["page_index"]] = put["page_id"]
        if step.moves is not None:
            self._move_slots(put)
        if len(step.copy_src):
            self._copy_pages(put["copy_src"].long(), put["copy_dst"].long())

    def reset(self) -> None:
        """Reset all slots to the state before the first step; the cache keeps its contents, which no sequence owns."""
        for column in (self.columns.last_token, self.columns.length, self.columns.ended, self.columns.page_table):
            column.zero_()
        self.columns.ended[self.slots :].fill_(1)

    def _copy_pages(self, source: Tensor, target: Tensor) -> None:
        """Copy the last, partly filled page of a prompt to the samples that fork from it."""
        kv = self.kv.view(torch.uint8) if self.kv.itemsize == 1 else self.kv  # not all operations support 8-bit floats
        # Gather a few positions at a time to keep the temporary small, but of all pages at once: a page may be the
        # source of one copy and the target of another.
        hidden = () if self.hidden is None else (self.hidden.unsqueeze(0),)
        for layer in (*kv, *hidden):
            count = max(1, MAX_COPY_BYTES // (layer[:, 0, 0].nbytes * len(source)))
            for start in range(0, self.page_size, count):
                positions = slice(start, start + count)
                layer[:, target, positions] = layer[:, source, positions]
        for scales in () if self.token_scales is None else self.token_scales:
            scales[:, target] = scales[:, source]
        tokens = self.columns.token_of.view(-1, self.page_size)
        tokens[target] = tokens[source]

    def _set_slots(self, new: NewSlots, put: Mapping[str, Tensor]) -> None:
        slot = put["new_slot"]
        for dtype, columns in self._packed.items():
            columns.index_copy_(1, slot, put[f"new_{dtype}"])
        if len(new.bias_slot) or self.bias_token.shape[1]:
            self._set_biases(slot, new, put)

    def _move_slots(self, put: Mapping[str, Tensor]) -> None:
        """Let slots stand for another position of the sequences of their sources."""
        slot, source = put["move_slot"], put["move_source"]
        for columns in self._packed.values():
            columns.index_copy_(1, slot, columns.index_select(1, source))
        bias = (self.bias_token, self.bias_value, self.bias_until, self.bias_prefix)
        for rows in (self.columns.page_table, *(table for table in bias if table.numel())):
            rows.index_copy_(0, slot, rows.index_select(0, source))
        self.columns.length.index_copy_(0, slot, put["move_length"])
        self.columns.last_token.index_copy_(0, slot, put["move_last_token"])

    def _set_biases(self, slot: Tensor, new: NewSlots, put: Mapping[str, Tensor]) -> None:
        """Write each slot's bias entries into its row, from the left; `until` 0 marks the rest as unused."""
        index = _index_in_slot(new.bias_slot)
        self._widen_biases(int(index.max(initial=-1)) + 1)
        self.bias_until.index_fill_(0, slot, 0)
        self.bias_prefix.index_fill_(0, slot, -1)
        if not len(index):
            return
        row, column = put["new_bias_slot"].long(), put["new_bias_index"].long()
        self.bias_token[row, column] = put["new_bias_token"].long()
        self.bias_value[row, column] = put["new_bias_value"]
        self.bias_until[row, column] = put["new_bias_until"].long()
        if len(new.prefix_slot):
            self._widen_prefixes(int(_index_in_slot(new.prefix_slot).max()) + 1, new.prefix.shape[1])
            row, column, tokens = put["new_prefix_slot"].long(), put["new_prefix_index"].long(), put["new_prefix"]
            self.bias_prefix[row, column, : tokens.shape[1]] = tokens.long()

    def _widen_prefixes(self, width: int, length: int) -> None:
        more, longer = width - self.bias_prefix.shape[1], length - self.bias_prefix.shape[2]
        if more > 0 or longer > 0:
            padding = (0, max(longer, 0), 0, max(more, 0))
            self.bias_prefix = torch.nn.functional.pad(self.bias_prefix, padding, value=-1)

    def generated_before(self, slots: Tensor, count: int) -> Tensor:
        """Return the last `count` tokens of each slot, the last one first: int64 `[r, count]`; −2 for prompt tokens."""
        position = self.columns.length[slots].unsqueeze(1) - 1 - torch.arange(count, device=self.device)
        generated = position >= self.prompt_len[slots].unsqueeze(1)
        position = position.clamp(min=0)
        page = self.columns.page_table[slots.unsqueeze(1), position // self.page_size].long()
        token = self.columns.token_of[page * self.page_size + position % self.page_size]
        return torch.where(generated, token, -2)

    def _widen_biases(self, width: int) -> None:
        more = width - self.bias_token.shape[1]
        if more > 0:
            for name in ("bias_token", "bias_value", "bias_until"):
                table: Tensor = getattr(self, name)
                setattr(self, name, torch.nn.functional.pad(table, (0, more)))


_COLUMN_ALIGNMENT = 64  # entries: 256 bytes or more
_RANDOM_KEYS = ("seed", "sample", "length")
_INT64 = (*_RANDOM_KEYS, "last_token", "eos_from_position", "prompt_len")
_COLUMNS = {
    dtype: (*first, *(name for name, column in DEVICE_COLUMNS.items() if column.dtype == dtype and name not in first))
    for dtype, first in {"int64": _INT64, "int32": ("ended",), "float32": ()}.items()
}
"""Names of the columns of each dtype."""


def changes(step: StepInput) -> dict[str, np.ndarray]:
    """Return the arrays that `apply` needs, by name; only non-empty ones."""
    arrays = {name: getattr(step, name) for name in ("page_id", "copy_src", "copy_dst")}
    # Indices of 64 bits, which the device need not convert.
    arrays |= {name: getattr(step, name).astype(np.int64) for name in ("page_slot", "page_index")}
    for i, shared in enumerate(step.shared):
        arrays |= {f"shared_slot_{i}": shared.slot, f"shared_page_{i}": shared.page}
    if step.new is not None:
        bias = ("bias_slot", "bias_token", "bias_value", "bias_until")
        arrays |= {f"new_{name}": getattr(step.new, name) for name in bias}
        arrays["new_slot"] = step.new.slot.astype(np.int64)
        values = {"ended": np.zeros_like(step.new.slot)} | step.new.sampling | structs.asdict(step.new)
        for dtype, names in _COLUMNS.items():
            arrays[f"new_{dtype}"] = np.array([values[name] for name in names], dtype)
        arrays["new_bias_index"] = _index_in_slot(step.new.bias_slot)
        if len(step.new.prefix_slot):
            arrays |= {"new_prefix_slot": step.new.prefix_slot, "new_prefix": step.new.prefix}
            arrays["new_prefix_index"] = _index_in_slot(step.new.prefix_slot)
    if step.moves is not None:
        arrays |= {f"move_{name}": getattr(step.moves, name).astype(np.int64) for name in step.moves.__struct_fields__}
    return {name: array for name, array in arrays.items() if len(array)}


def _index_in_slot(bias_slot: np.ndarray) -> np.ndarray:
    """Return each entry's index among the entries of its slot, which are contiguous: `[4, 4, 7] -> [0, 1, 0]`."""
    _, first, owner = np.unique(bias_slot, return_index=True, return_inverse=True)
    return (np.arange(len(bias_slot)) - first[owner]).astype(np.int32)
