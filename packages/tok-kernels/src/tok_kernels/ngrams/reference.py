"""Learn and predict tokens by n-gram lookup, and accept drafts, in plain torch.

Legend: n sequences or tokens, k tokens of a draft, S slots.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from tok_kernels.ngrams.table import (
    CHECK_BITS,
    CONTEXT_MULTIPLIER,
    CONTEXTS,
    COUNT_SHIFT,
    MAX_CONTEXT,
    MAX_COUNT,
    NO_TOKEN,
    PAIR_MULTIPLIER,
    TOKEN_BITS,
    TOKEN_MULTIPLIER,
    NgramTable,
)
from tok_kernels.slots.columns import DraftRows, SlotColumns


def learn_tokens(slot_n: Tensor, count_n: Tensor, max_count: int, slots: SlotColumns, ngrams: NgramTable) -> Tensor:
    """Compute `Backend.learn_tokens`."""
    slot = slot_n.long()
    offset = torch.arange(max_count, device=slot.device)
    row, offset = ((offset < count_n[:, None]) & (slots.ended[slot] == 0)[:, None]).nonzero(as_tuple=True)
    slot = slot[row]
    position = slots.length[slot] - count_n[row] + offset
    recent = _tokens(slots, slot[:, None], position[:, None] - torch.arange(1 + MAX_CONTEXT, device=slot.device))
    token, state, known = recent[:, :1], *_contexts(recent[:, 1:], ngrams.salt[slot])
    right = _predict(state, known, ngrams) == token[:, 0]
    pair, state, token = _pair_state(state, token)[known] & ngrams.mask, state[known], token.expand_as(known)[known]
    ones = torch.ones_like(pair, dtype=torch.int32)
    ngrams.pair_count.index_add_(0, pair, ones)
    entry = _entry(state, ngrams)
    count = ngrams.pair_count[pair].long().clamp(max=MAX_COUNT)  # once all are counted: their order makes no difference
    ngrams.total.index_add_(0, entry, ones)
    packed = (count << COUNT_SHIFT) | (token << CHECK_BITS) | _check(state)
    ngrams.best.scatter_reduce_(0, entry, packed, "amax")
    return torch.zeros_like(count_n).index_add_(0, row, right.to(count_n.dtype))


def predict_tokens(slot_n: Tensor, count: int, slots: SlotColumns, ngrams: NgramTable) -> Tensor:
    """Compute `Backend.predict_tokens`."""
    return _continuations(slot_n, slot_n.new_full((count, len(slot_n)), NO_TOKEN), slots, ngrams).T


def draft_tokens(drafts: DraftRows, slots: SlotColumns, ngrams: NgramTable) -> Tensor:
    """Compute `Backend.draft_tokens`."""
    return _continuations(drafts.slot[0], drafts.given[1:], slots, ngrams)


def accept_drafts(drafts: DraftRows, draft_kn: Tensor, count_B: Tensor, slots: SlotColumns) -> Tensor:
    """Compute `Backend.accept_drafts`."""
    slot, *lent = drafts.slot.long()
    newest, accepted = slot, torch.zeros_like(drafts.slot[0])
    going = torch.ones_like(slot, dtype=torch.bool)
    for lent_n, draft_n in zip(lent, draft_kn, strict=True):
        going = going & (lent_n >= 0) & (draft_n == slots.last_token[newest]) & (slots.ended[newest] == 0)
        newest = torch.where(going, lent_n, newest)
        accepted += going
    slots.length[slot] += accepted
    slots.last_token[slot] = slots.last_token[newest]
    slots.ended[slot] = slots.ended[newest]
    row, is_row = drafts.row[0], drafts.row >= 0
    count_B[drafts.row[1:][is_row[1:]].long()] = 0
    count_B[row[is_row[0]].long()] = (1 + accepted)[is_row[0]]
    return accepted


def _continuations(slot_n: Tensor, given_kn: Tensor, slots: SlotColumns, ngrams: NgramTable) -> Tensor:
    """Return k tokens that may follow the last token of each slot, int64 `[k, n]`: given (not −1) or predicted ones."""
    slot = slot_n.long()
    position = slots.length[slot][:, None] - torch.arange(1, MAX_CONTEXT, device=slot.device)
    window = torch.cat((slots.last_token[slot][:, None], _tokens(slots, slot[:, None], position)), 1)
    for given_n in given_kn.long():
        token = _predict(*_contexts(window[:, :MAX_CONTEXT], ngrams.salt[slot]), ngrams)
        token = torch.where(given_n >= 0, given_n, token)
        window = torch.cat((token[:, None], window), 1)
    return window[:, : len(given_kn)].flip(1).T


def _tokens(slots: SlotColumns, slot: Tensor, position: Tensor) -> Tensor:
    """Return the cached tokens at these positions of slots; NO_TOKEN before the start of a sequence."""
    before, position = position < 0, position.clamp(min=0)
    page = slots.page_table[slot, position // slots.page_size].long()
    return torch.where(before, NO_TOKEN, slots.token_of[page * slots.page_size + position % slots.page_size])


def _contexts(window_nW: Tensor, salt_n: Tensor) -> tuple[Tensor, Tensor]:
    """Return the hash of each context, shortest first, and whether all its tokens are known, `[n, C]`.

    `window_nW` holds the last W = MAX_CONTEXT tokens, the last one first; NO_TOKEN: unknown, or before the start.
    """
    powers, salt_powers, lengths = (torch.tensor(one, device=salt_n.device) for one in (POWERS, SALT_POWERS, CONTEXTS))
    state = ((window_nW[:, None] + 1) * powers).sum(2) + salt_n[:, None] * salt_powers
    mixed = (state ^ lengths) * CONTEXT_MULTIPLIER
    known = (window_nW >= 0).cumprod(1)[:, lengths - 1].bool()
    return mixed ^ ((mixed >> 32) & 0xFFFFFFFF), known


def _signed(number: int) -> int:
    """Return the 64-bit number of these last bits, as torch computes with it."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


# The hash of a context: salt, then token + 1 from the last token on, each after a multiplication of what was before.
SALT_POWERS: Final = [_signed(TOKEN_MULTIPLIER**length) for length in CONTEXTS]
POWERS: Final = [
    [_signed(TOKEN_MULTIPLIER ** (length - 1 - i)) if i < length else 0 for i in range(MAX_CONTEXT)]
    for length in CONTEXTS
]


def _entry(state: Tensor, ngrams: NgramTable) -> Tensor:
    return (state >> CHECK_BITS) & ngrams.mask


def _check(state: Tensor) -> Tensor:
    return state & ((1 << CHECK_BITS) - 1)


def _pair_state(state: Tensor, token: Tensor) -> Tensor:
    mixed = (state ^ token) * PAIR_MULTIPLIER
    return (mixed >> 32) & 0xFFFFFFFF


def _predict(state_nC: Tensor, known_nC: Tensor, ngrams: NgramTable) -> Tensor:
    """Return the most probable next token after the contexts of each sequence, NO_TOKEN if none is known.

    The share of the best token among those that followed a context, c / (total + 1), decides between the contexts; of
    equal shares, the longer context's.
    """
    entry = _entry(state_nC, ngrams)
    packed = ngrams.best[entry]
    count = torch.where(known_nC & (_check(packed) == _check(state_nC)), packed >> COUNT_SHIFT, 0)
    share = (count / (ngrams.total[entry] + 1).double()).flip(1)  # the longest context first
    best = share.argmax(1, keepdim=True)
    token = (packed.flip(1).gather(1, best) >> CHECK_BITS) & ((1 << TOKEN_BITS) - 1)
    return torch.where(share.gather(1, best) > 0, token, NO_TOKEN)[:, 0]
