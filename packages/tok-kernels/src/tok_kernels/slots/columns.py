"""Define `SlotColumns`, the state of running sequences on the device, and what decode steps take from it.

Axes: S slots, P maximum pages of a slot, C cache rows (pages × page size), B decode rows, E end ids (EOS tokens),
n sequences with drafts, k drafted tokens of one.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SlotColumns:
    """Columns with one entry per slot, changed in place. A slot holds one running sequence.

    last_token         int64 [S]     input token of the slot's next decode row
    length             int64 [S]     positions in the cache
    ended              int32 [S]     not 0 once an end id was sampled, until the slot has a new owner: padding rows
    eos_from_position  int64 [S]     first position at which a sampled end id ends the sequence
    page_table         int32 [S, P]  page ids of every slot
    token_of           int64 [C]     the token whose key and value each cache row holds
    end_ids            int64 [E]     the model's EOS token ids
    seed, sample       int64 [S]     random key of the slot's sequence, as in `SamplingBatch`
    temperature        float32 [S]   its temperature
    page_size                        positions per page
    scratch                          cache row to which rows of ended slots write, and which no sequence reads

    Steps that compute more rows than there are sequences (CUDA graphs) are padded with a slot that stays ended.
    """

    last_token: Tensor
    length: Tensor
    ended: Tensor
    eos_from_position: Tensor
    page_table: Tensor
    token_of: Tensor
    end_ids: Tensor
    seed: Tensor
    sample: Tensor
    temperature: Tensor
    page_size: int
    scratch: int


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Inputs of B decode rows, one token each.

    token          int64 [B]    input token
    position       int64 [B]    position of the token in its sequence
    kv_index       int64 [B]    cache row for the token's key and value
    kv_len         int32 [B]    positions that the row attends to, its own included; 0 for a slot that has ended
    next_position  int64 [B]    position of the token that the row samples
    seed, sample   int64 [B]    as in `SlotColumns`
    temperature    float32 [B]  as in `SlotColumns`
    """

    token: Tensor
    position: Tensor
    kv_index: Tensor
    kv_len: Tensor
    next_position: Tensor
    seed: Tensor
    sample: Tensor
    temperature: Tensor


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Drafted tokens that decode rows verify in a step: up to k of each of n sequences.

    slot   int32 [1 + k, n]  slots of the sequences, then the slots that feed their drafted tokens; −1: none
    row    int32 [1 + k, n]  the decode rows of these slots
    given  int32 [1 + k, n]  drafted tokens, from the second entry on; −1: to be predicted

    No drafted token follows an entry of −1. Padding is a sequence in row −1 without drafted tokens.
    """

    slot: Tensor
    row: Tensor
    given: Tensor
