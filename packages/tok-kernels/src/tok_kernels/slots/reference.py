"""Make decode rows from slots, store sampled tokens in slots, and fill slots for drafts, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tok_kernels.slots.columns import DecodeRows, DraftRows, SlotColumns


def decode_rows(slot_B: Tensor, slots: SlotColumns) -> DecodeRows:
    """Compute `Backend.decode_rows`."""
    slot = slot_B.long()
    live = slots.ended[slot] == 0
    position = torch.where(live, slots.length[slot], 0)
    token = torch.where(live, slots.last_token[slot], 0)
    page = slots.page_table[slot, position // slots.page_size].long()
    kv_index = torch.where(live, page * slots.page_size + position % slots.page_size, slots.scratch)
    slots.token_of[kv_index] = token
    slots.length[slot] += live
    kv_len = torch.where(live, position + 1, 0).int()
    keys = slots.seed[slot], slots.sample[slot], slots.temperature[slot]
    return DecodeRows(token, position, kv_index, kv_len, position + 1, *keys)


def record_sampled_tokens(slot_R: Tensor, token_R: Tensor, logprob_R: Tensor, slots: SlotColumns) -> Tensor:
    """Compute `Backend.record_sampled_tokens`."""
    slot = slot_R.long()
    slots.last_token[slot] = token_R
    ends = torch.isin(token_R, slots.end_ids) & (slots.length[slot] >= slots.eos_from_position[slot])
    slots.ended[slot] |= ends
    return torch.stack((token_R.int(), logprob_R.view(torch.int32)))


def set_draft_slots(drafts: DraftRows, draft_kn: Tensor, columns: Sequence[Tensor], slots: SlotColumns) -> None:
    """Compute `Backend.set_draft_slots`."""
    i, sequence = (drafts.slot[1:] >= 0).nonzero(as_tuple=True)
    slot, source, token = drafts.slot[1 + i, sequence].long(), drafts.slot[0, sequence].long(), draft_kn[i, sequence]
    num_pages = (slots.length[source] + 2 + i + slots.page_size - 1) // slots.page_size
    is_copied = torch.arange(slots.page_table.shape[1], device=slot.device) < num_pages[:, None]
    slots.page_table[slot] = torch.where(is_copied, slots.page_table[source], slots.page_table[slot])
    for of_dtype in columns:
        of_dtype.index_copy_(1, slot, of_dtype.index_select(1, source))
    slots.length.index_add_(0, slot, 1 + i)
    slots.last_token.index_copy_(0, slot, token.clamp(min=0))
    slots.ended.index_add_(0, slot, (token < 0).int())
