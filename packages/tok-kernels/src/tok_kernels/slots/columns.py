"""Define `SlotColumns`, per-sequence state on the device: decode rows read it, and sampled tokens are written to it.

Axes: S slots, P pages a slot may hold, C cache rows (pages × page size), B decode rows, E end ids.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SlotColumns:
    """Columns indexed by slot, changed in place.

    last_token         int64 [S]     input token of the slot's next decode row
    length             int64 [S]     positions in the cache
    ended              int32 [S]     1 once an end id was sampled: the slot computes nothing more until it is reassigned
    eos_from_position  int64 [S]     first position at which a sampled end id ends the sample
    page_table         int32 [S, P]  page ids of every slot
    token_of           int64 [C]     the token whose key and value each cache row holds
    end_ids            int64 [E]     the model's end ids
    page_size                        positions that a page holds
    scratch                          a cache row that no sequence reads, to which ended slots write

    A slot whose `ended` is never reset pads steps that compute more rows than they have sequences.
    """

    last_token: Tensor
    length: Tensor
    ended: Tensor
    eos_from_position: Tensor
    page_table: Tensor
    token_of: Tensor
    end_ids: Tensor
    page_size: int
    scratch: int


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Inputs of B decode rows.

    token     int64 [B]  input token
    position  int64 [B]  position of the token in its sequence
    kv_index  int64 [B]  cache row for the token's key and value
    kv_len    int32 [B]  positions that the row may read, its own included; 0 for a slot that has ended
    """

    token: Tensor
    position: Tensor
    kv_index: Tensor
    kv_len: Tensor
