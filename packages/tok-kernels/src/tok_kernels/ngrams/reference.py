"""Learn and predict tokens by n-gram lookup, and accept drafts, in plain torch.

Legend: n sequences or tokens, k tokens of a draft, S slots.
"""

from __future__ import annotations

from collections.abc import Iterator

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
from tok_kernels.slots.columns import SlotColumns


def learn_tokens(slot_n: Tensor, count_n: Tensor, max_count: int, slots: SlotColumns, ngrams: NgramTable) -> Tensor:
    """Compute `Backend.learn_tokens`."""
    slot = slot_n.long()
    offset = torch.arange(max_count, device=slot.device)
    row, offset = ((offset < count_n[:, None]) & (slots.ended[slot] == 0)[:, None]).nonzero(as_tuple=True)
    slot = slot[row]
    position = slots.length[slot] - count_n[row] + offset
    token = _tokens(slots, slot, position)
    window = [_tokens(slots, slot, position - 1 - i) for i in range(MAX_CONTEXT)]
    right = _predict(window, ngrams.salt[slot], ngrams) == token
    learned = []
    for state, known in _contexts(window, ngrams.salt[slot]):
        pair = _pair_state(state, token)[known] & ngrams.mask
        ngrams.pair_count.index_add_(0, pair, torch.ones_like(pair, dtype=torch.int32))
        learned.append((state[known], pair, token[known]))
    for state, pair, followed_by in learned:  # after all pairs are counted, so that their order makes no difference
        entry, count = _entry(state, ngrams), ngrams.pair_count[pair].long().clamp(max=MAX_COUNT)
        ngrams.total.index_add_(0, entry, torch.ones_like(entry, dtype=torch.int32))
        packed = (count << COUNT_SHIFT) | (followed_by << CHECK_BITS) | _check(state)
        ngrams.best.scatter_reduce_(0, entry, packed, "amax")
    return torch.zeros_like(count_n).index_add_(0, row, right.to(count_n.dtype))


def predict_tokens(slot_n: Tensor, count: int, slots: SlotColumns, ngrams: NgramTable) -> Tensor:
    """Compute `Backend.predict_tokens`."""
    slot = slot_n.long()
    length, salt = slots.length[slot], ngrams.salt[slot]
    window = [slots.last_token[slot], *(_tokens(slots, slot, length - 1 - i) for i in range(MAX_CONTEXT - 1))]
    predicted = []
    for _ in range(count):
        token = _predict(window, salt, ngrams)
        window = [token, *window[:-1]]
        predicted.append(token)
    return torch.stack(predicted, 1) if count else slot.new_empty((len(slot), 0))


def accept_drafts(slot_n: Tensor, lent_nk: Tensor, draft_nk: Tensor, slots: SlotColumns) -> Tensor:
    """Compute `Backend.accept_drafts`."""
    slot, lent = slot_n.long(), lent_nk.long()
    newest, accepted = slot, torch.zeros_like(slot_n)
    going = torch.ones_like(slot, dtype=torch.bool)
    for i in range(lent.shape[1]):
        going = going & (lent[:, i] >= 0) & (draft_nk[:, i] == slots.last_token[newest]) & (slots.ended[newest] == 0)
        newest = torch.where(going, lent[:, i], newest)
        accepted += going
    slots.length[slot] += accepted
    slots.last_token[slot] = slots.last_token[newest]
    slots.ended[slot] = slots.ended[newest]
    return accepted


def _tokens(slots: SlotColumns, slot: Tensor, position: Tensor) -> Tensor:
    """Return the cached tokens at these positions of slots; NO_TOKEN before the start of a sequence."""
    before, position = position < 0, position.clamp(min=0)
    page = slots.page_table[slot, position // slots.page_size].long()
    return torch.where(before, NO_TOKEN, slots.token_of[page * slots.page_size + position % slots.page_size])


def _contexts(window: list[Tensor], salt: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the hash of each context, shortest first, and whether all its tokens are known.

    `window` holds the last tokens, the last one first; NO_TOKEN for unknown ones and before the start.
    """
    state, known = salt, torch.ones_like(salt, dtype=torch.bool)
    for i, token in enumerate(window):
        state, known = state * TOKEN_MULTIPLIER + token + 1, known & (token >= 0)
        if i + 1 in CONTEXTS:
            mixed = (state ^ (i + 1)) * CONTEXT_MULTIPLIER
            yield mixed ^ ((mixed >> 32) & 0xFFFFFFFF), known


def _entry(state: Tensor, ngrams: NgramTable) -> Tensor:
    return (state >> CHECK_BITS) & ngrams.mask


def _check(state: Tensor) -> Tensor:
    return state & ((1 << CHECK_BITS) - 1)


def _pair_state(state: Tensor, token: Tensor) -> Tensor:
    mixed = (state ^ token) * PAIR_MULTIPLIER
    return (mixed >> 32) & 0xFFFFFFFF


def _predict(window: list[Tensor], salt: Tensor, ngrams: NgramTable) -> Tensor:
    """Return the most probable next token of each window, NO_TOKEN if no context is known.

    The share of the best token among those that followed a context, c / (total + 1), decides between the contexts; of
    equal shares, the longer context's.
    """
    token, best_count, best_total = torch.full_like(salt, NO_TOKEN), torch.zeros_like(salt), torch.ones_like(salt)
    for state, known in _contexts(window, salt):
        entry = _entry(state, ngrams)
        packed, total = ngrams.best[entry], ngrams.total[entry].long() + 1
        count = packed >> COUNT_SHIFT
        better = known & (count > 0) & (_check(packed) == _check(state)) & (count * best_total >= best_count * total)
        token = torch.where(better, (packed >> CHECK_BITS) & ((1 << TOKEN_BITS) - 1), token)
        best_count, best_total = torch.where(better, count, best_count), torch.where(better, total, best_total)
    return token
