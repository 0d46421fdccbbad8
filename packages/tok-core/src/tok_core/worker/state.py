"""Keep on the device what outlives a step: the KV cache, page tables, and a row of columns for each slot.

Each step first writes what has changed since the last step (`state_changes`, `WorkerState.apply`): new sequences in
slots, page table entries, slots that move to another position, page copies. The forward pass and sampling then update
lengths, tokens and the KV cache.

Legend: K key/value heads, N hidden size.
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
from tok_core.worker.bias_tables import BiasTables, bias_arrays
from tok_core.worker.sleep import MemoryRegion
from tok_kernels import LayerCache, NgramTable, SlotColumns, kv_position_bytes

MAX_COPY_BYTES = 32 << 20  # gathered at once while pages are copied, unless one position of each page is more
_COLUMN_ALIGNMENT = 64  # entries: 256 bytes or more
_RANDOM_KEYS = ("seed", "sample", "length")
_FIRST_COLUMNS = {
    "int64": (*_RANDOM_KEYS, "last_token", "eos_from_position", "prompt_len", "salt"),
    "int32": ("ended",),
    "float32": (),
}
_COLUMNS = {
    dtype: (*first, *(name for name, column in DEVICE_COLUMNS.items() if column.dtype == dtype and name not in first))
    for dtype, first in _FIRST_COLUMNS.items()
}
"""Names of the columns of each dtype: those above, then the other DEVICE_COLUMNS."""


def kv_bytes_per_token(model: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes of one position in the KV cache of all layers, its token id included."""
    return model.num_layers * kv_position_bytes(model.num_kv_heads, model.head_dim, dtype) + 8


def page_table_bytes(slots: int, max_len: int, page_size: int) -> int:
    """Return the bytes of the page tables of `slots` slots of `max_len` positions, and of the padding slot."""
    return 4 * (slots + 1) * -(-max_len // page_size)


class WorkerState:
    """Tensors on the device that outlive a step.

    Columns have `slots` + 1 entries: the last slot never holds a sequence and stands for padding rows. Likewise the
    cache has `num_pages` + 1 pages: no sequence owns the last one, to which padding rows and ended slots write.

    slots, num_pages    without the padding slot and the page that no sequence owns
    pages_per_slot      width of the page table
    scales              scales of cached keys and values, float32 `[layers, 2, K]`; None: there are none by head
    processed_logprobs  `SamplingBatch.processed` of every step
    max_draft_tokens    maximum number of tokens that the worker predicts for a sequence's draft; 0: it predicts none
    memory              memory of the KV cache, for an engine that may sleep; None: PyTorch's

    Attributes, besides these:

    kv            KV cache, `[layers, 2, pages, page_size, K, head_dim]`; `caches` are its layers
    token_scales  scales of an int8 cache, float32 `[layers, 2, pages, K, page_size]`; None: another dtype
    hidden        hidden states that a draft head reads, `[pages, page_size, N]`; None: there is no such head
    ngrams        counts of which token follows which; None without drafts
    columns       columns that kernels read and advance: last token, length, page table, …
    sampling      columns of sampling parameters, by the names of DEVICE_COLUMNS
    biases        logit biases of each slot
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
        max_draft_tokens: int = 0,
        memory: MemoryRegion | None = None,
    ) -> None:
        self.device = device
        self.processed_logprobs = processed_logprobs
        self.slots = slots
        self.max_draft_tokens = max_draft_tokens
        self.num_pages = num_pages
        self.page_size = page_size
        self._memory = memory
        layers, heads = (model.num_layers, 2, num_pages + 1), model.num_kv_heads
        self.kv = self.new_cache((*layers, page_size, heads, model.head_dim), dtype)
        self.token_scales = None
        if dtype == torch.int8:
            self.token_scales = self.new_cache((*layers, heads, page_size), torch.float32)
        self.hidden: Tensor | None = None
        unscaled = [(None, None)] * model.num_layers
        layer_scales = unscaled if scales is None else scales
        layer_token_scales = unscaled if self.token_scales is None else self.token_scales
        self.caches = [
            LayerCache(*layer_kv, *by_head, *by_token)
            for layer_kv, by_head, by_token in zip(self.kv, layer_scales, layer_token_scales, strict=True)
        ]
        # Columns of one dtype are rows of one tensor, so that one operation writes a slot's entries in all of them.
        self._columns_of_dtype = {dtype: self._new_columns(dtype, len(names)) for dtype, names in _COLUMNS.items()}
        columns: dict[str, Tensor] = {}
        for name_of_dtype, names in _COLUMNS.items():
            columns.update(zip(names, self._columns_of_dtype[name_of_dtype], strict=True))
        # One gather reads all that a row's random numbers depend on.
        self.random_keys = self._columns_of_dtype["int64"][: len(_RANDOM_KEYS)]
        self.columns = SlotColumns(
            last_token=columns["last_token"],
            length=columns["length"],
            ended=columns["ended"],
            eos_from_position=columns["eos_from_position"],
            page_table=torch.zeros((slots + 1, pages_per_slot), dtype=torch.int32, device=device),
            token_of=torch.zeros((num_pages + 1) * page_size, dtype=torch.int64, device=device),
            end_ids=torch.tensor(model.eos_token_ids, dtype=torch.int64, device=device),
            seed=columns["seed"],
            sample=columns["sample"],
            temperature=columns["temperature"],
            page_size=page_size,
            scratch=num_pages * page_size,
        )
        self.columns.ended[slots] = 1
        self.ngrams = NgramTable.empty(columns["salt"]) if max_draft_tokens else None
        self.prompt_len = columns["prompt_len"]
        self.sampling = {name: columns[name] for name in DEVICE_COLUMNS}
        self.biases = BiasTables(slots, device)

    @property
    def all_columns(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return all columns of slots by dtype: int64, int32 and float32, each `[·, slots + 1]`."""
        int64, int32, float32 = self._columns_of_dtype.values()
        return int64, int32, float32

    @property
    def max_len(self) -> int:
        """Return how many positions the page table of a slot covers."""
        return self.columns.page_table.shape[1] * self.page_size

    def new_cache(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate zeros in the memory of the KV cache, which may be released while the engine sleeps."""
        if self._memory is None:
            return torch.zeros(shape, dtype=dtype, device=self.device)
        return self._memory.zeros(shape, dtype)

    def add_hidden_states(self, hidden_size: int, dtype: torch.dtype) -> Tensor:
        """Allocate `hidden`, and return it."""
        self.hidden = self.new_cache((self.num_pages + 1, self.page_size, hidden_size), dtype)
        return self.hidden

    def _new_columns(self, dtype: str, count: int) -> Tensor:
        """Allocate columns as rows of one tensor `[count, slots + 1]`, each aligned as if it were allocated alone."""
        width = -(-(self.slots + 1) // _COLUMN_ALIGNMENT) * _COLUMN_ALIGNMENT
        return torch.zeros((count, width), dtype=getattr(torch, dtype), device=self.device)[:, : self.slots + 1]

    def kv_index(self, slot: Tensor, position: Tensor) -> Tensor:
        """Return the rows of positions in the KV cache, int64: page × page_size + offset in the page.

        `slot` and `position` are integer tensors of shapes that broadcast.
        """
        page = self.columns.page_table[slot.long(), position // self.page_size].long()
        return page * self.page_size + position % self.page_size

    def apply(self, step: StepInput, staged: Mapping[str, Tensor]) -> None:
        """Apply the step's changes before its forward pass; `staged` has `state_changes(step)` on the device."""
        if step.new is not None:
            self._set_slots(step.new, staged)
        for i, shared in enumerate(step.shared):
            self.columns.page_table[staged[f"shared_slot_{i}"].long(), : len(shared.page)] = staged[f"shared_page_{i}"]
        if len(step.page_slot):
            self.columns.page_table[staged["page_slot"], staged["page_index"]] = staged["page_id"]
        if step.moves is not None:
            self._move_slots(staged, step.max_kv)
        if len(step.copy_src):
            self._copy_pages(staged["copy_src"].long(), staged["copy_dst"].long())

    def reset(self) -> None:
        """Reset all slots to the state before the first step; the cache keeps its contents, which no sequence owns."""
        for column in (self.columns.last_token, self.columns.length, self.columns.ended, self.columns.page_table):
            column.zero_()
        self.columns.ended[self.slots :].fill_(1)

    def _copy_pages(self, source: Tensor, target: Tensor) -> None:
        """Copy pages to pages, all at once: a page may be the source of one copy and the target of another.

        The manager copies the last, partly filled page of a prompt for the samples that fork from it.
        """
        kv = self.kv.view(torch.uint8) if self.kv.itemsize == 1 else self.kv  # not all operations support 8-bit floats
        hidden = () if self.hidden is None else (self.hidden.unsqueeze(0),)
        for layer in (*kv, *hidden):
            # A few positions at a time, of all pages, keep the temporary small.
            count = max(1, MAX_COPY_BYTES // (layer[:, 0, 0].nbytes * len(source)))
            for start in range(0, self.page_size, count):
                positions = slice(start, start + count)
                layer[:, target, positions] = layer[:, source, positions]
        for scales in () if self.token_scales is None else self.token_scales:
            scales[:, target] = scales[:, source]
        tokens = self.columns.token_of.view(-1, self.page_size)
        tokens[target] = tokens[source]

    def _set_slots(self, new: NewSlots, staged: Mapping[str, Tensor]) -> None:
        """Write the columns of slots that get a new sequence."""
        slot = staged["new_slot"]
        for dtype, columns in self._columns_of_dtype.items():
            columns.index_copy_(1, slot, staged[f"new_{dtype}"])
        self.biases.replace(slot, new, staged)

    def _move_slots(self, staged: Mapping[str, Tensor], max_kv: int) -> None:
        """Move slots to other positions of their sources' sequences (`SlotMoves`): copy columns, pages and biases."""
        slot, source = staged["move_slot"], staged["move_source"]
        pages = self.columns.page_table[:, : -(-max_kv // self.page_size)]
        pages.index_copy_(0, slot, pages.index_select(0, source))
        for of_dtype in self.all_columns:
            of_dtype.index_copy_(1, slot, of_dtype.index_select(1, source))
        self.biases.copy(slot, source)
        self.columns.length.index_copy_(0, slot, staged["move_length"])
        self.columns.last_token.index_copy_(0, slot, staged["move_last_token"])

    def generated_before(self, slots: Tensor, count: int) -> Tensor:
        """Return the last `count` tokens of each slot, the last one first: int64 `[r, count]`; −2 for prompt tokens."""
        position = self.columns.length[slots].unsqueeze(1) - 1 - torch.arange(count, device=self.device)
        generated = position >= self.prompt_len[slots].unsqueeze(1)
        token = self.columns.token_of[self.kv_index(slots.unsqueeze(1), position.clamp(min=0))]
        return torch.where(generated, token, -2)


def state_changes(step: StepInput) -> dict[str, np.ndarray]:
    """Return the host arrays that `WorkerState.apply` needs, by name; only non-empty ones."""
    arrays = {name: getattr(step, name) for name in ("page_id", "copy_src", "copy_dst")}
    # 64-bit indices spare the device a conversion.
    arrays |= {name: getattr(step, name).astype(np.int64) for name in ("page_slot", "page_index")}
    for i, shared in enumerate(step.shared):
        arrays |= {f"shared_slot_{i}": shared.slot, f"shared_page_{i}": shared.page}
    if step.new is not None:
        arrays["new_slot"] = step.new.slot.astype(np.int64)
        columns = {"ended": np.zeros_like(step.new.slot)} | step.new.sampling | structs.asdict(step.new)
        for dtype, names in _COLUMNS.items():
            arrays[f"new_{dtype}"] = np.array([columns[name] for name in names], dtype)
        arrays |= bias_arrays(step.new)
    if step.moves is not None:
        arrays |= {f"move_{name}": getattr(step.moves, name).astype(np.int64) for name in step.moves.__struct_fields__}
    return {name: array for name, array in arrays.items() if len(array)}
