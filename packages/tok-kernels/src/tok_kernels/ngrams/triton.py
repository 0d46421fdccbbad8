"""Learn and predict tokens by n-gram lookup, and accept drafts: one kernel each.

Tokens are learned in two passes, so that the order of threads makes no difference. The first pass only reads `total`
and `best` and only adds to `pair_count`; the second reads the final counts of pairs.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tok_kernels.ngrams import table
from tok_kernels.ngrams.table import NgramTable
from tok_kernels.slots.columns import DraftRows, SlotColumns

_LEARN_BLOCK = 128  # tokens of a program
_BLOCK = 32  # sequences of a program
_MIN_LENGTH_BLOCK = 16  # drafted tokens of a sequence; longer drafts have kernels of their own

_NO_TOKEN = tl.constexpr(table.NO_TOKEN)
_MAX_CONTEXT = tl.constexpr(table.MAX_CONTEXT)
_CHECK_BITS = tl.constexpr(table.CHECK_BITS)
_CHECK_MASK, _TOKEN_MASK = tl.constexpr((1 << table.CHECK_BITS) - 1), tl.constexpr((1 << table.TOKEN_BITS) - 1)
_COUNT_SHIFT, _MAX_COUNT = tl.constexpr(table.COUNT_SHIFT), tl.constexpr(table.MAX_COUNT)
_TOKEN_MULTIPLIER = tl.constexpr(table.TOKEN_MULTIPLIER)
_CONTEXT_MULTIPLIER = tl.constexpr(table.CONTEXT_MULTIPLIER)
_PAIR_MULTIPLIER = tl.constexpr(table.PAIR_MULTIPLIER)


def learn_tokens(slot_n: Tensor, count_n: Tensor, max_count: int, slots: SlotColumns, ngrams: NgramTable) -> Tensor:
    """Compute `Backend.learn_tokens`."""
    size = slot_n.shape[0] * max_count
    right = torch.zeros_like(count_n)
    for first_pass in (True, False) if size else ():
        _learn_tokens_kernel[(triton.cdiv(size, _LEARN_BLOCK),)](
            *(slot_n, count_n, right, size, max_count),
            *(slots.length, slots.ended, slots.page_table, slots.page_table.stride(0), slots.token_of),
            *(ngrams.pair_count, ngrams.total, ngrams.best, ngrams.salt, ngrams.mask),
            FIRST_PASS=first_pass,
            PAGE=slots.page_size,
            BLOCK=_LEARN_BLOCK,
            num_warps=_LEARN_BLOCK // 32,
        )
    return right


def predict_tokens(slot_n: Tensor, count: int, slots: SlotColumns, ngrams: NgramTable) -> Tensor:
    """Compute `Backend.predict_tokens`."""
    row_count = slot_n.shape[0]
    out = torch.empty((row_count, count), dtype=torch.int64, device=slot_n.device)
    if out.numel():
        _launch_predictions(slot_n, slot_n, out.T, slots, ngrams, drafts=False)
    return out


def draft_tokens(drafts: DraftRows, slots: SlotColumns, ngrams: NgramTable) -> Tensor:
    """Compute `Backend.draft_tokens`."""
    draft_kn = torch.empty(drafts.slot[1:].shape, dtype=torch.int64, device=drafts.slot.device)
    if draft_kn.numel():
        _launch_predictions(drafts.slot, drafts.given, draft_kn, slots, ngrams, drafts=True)
    return draft_kn


def _launch_predictions(
    slot: Tensor, given: Tensor, out_kn: Tensor, slots: SlotColumns, ngrams: NgramTable, *, drafts: bool
) -> None:
    count, row_count = out_kn.shape
    _predict_tokens_kernel[(triton.cdiv(row_count, _BLOCK),)](
        *(slot, given, out_kn, *out_kn.stride(), row_count, count),
        *(slots.last_token, slots.length, slots.page_table, slots.page_table.stride(0), slots.token_of),
        *(ngrams.total, ngrams.best, ngrams.salt, ngrams.mask),
        DRAFTS=drafts,
        LENGTH_BLOCK=max(_MIN_LENGTH_BLOCK, triton.next_power_of_2(count)) if drafts else 1,
        PAGE=slots.page_size,
        BLOCK=_BLOCK,
        num_warps=_BLOCK // 32,
    )


def accept_drafts(drafts: DraftRows, draft_kn: Tensor, count_B: Tensor, slots: SlotColumns) -> Tensor:
    """Compute `Backend.accept_drafts`."""
    draft_length, row_count = draft_kn.shape
    accepted = torch.empty_like(drafts.slot[0])
    if row_count:
        _accept_drafts_kernel[(triton.cdiv(row_count, _BLOCK),)](
            *(drafts.slot, drafts.row, draft_kn, accepted, count_B, row_count, draft_length),
            *(slots.last_token, slots.length, slots.ended),
            LENGTH_BLOCK=max(_MIN_LENGTH_BLOCK, triton.next_power_of_2(draft_length)),
            BLOCK=_BLOCK,
            num_warps=_BLOCK // 32,
        )
    return accepted


@triton.jit(
    do_not_specialize=["size", "max_count", "page_table_stride", "entry_mask"],
    do_not_specialize_on_alignment=["slot_ptr", "count_ptr", "right_ptr"],
)
def _learn_tokens_kernel(
    slot_ptr: tl.tensor,
    count_ptr: tl.tensor,
    right_ptr: tl.tensor,
    size: tl.tensor,
    max_count: tl.tensor,
    length_ptr: tl.tensor,
    ended_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    page_table_stride: tl.tensor,
    token_of_ptr: tl.tensor,
    pair_count_ptr: tl.tensor,
    total_ptr: tl.tensor,
    best_ptr: tl.tensor,
    salt_ptr: tl.tensor,
    entry_mask: tl.tensor,
    FIRST_PASS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Learn BLOCK tokens, one per thread. Grid: `(⌈size / BLOCK⌉,)`.

    With FIRST_PASS, predict each token, and count pairs of a context and a token. Otherwise count contexts, and update
    the most frequent token of each.

    slot_ptr, count_ptr         int32 [n], slots and how many of their last tokens are learned, `max_count` at most
    right_ptr                   int32 [n], result: correct predictions; zeros before the first pass
    size                        n × max_count
    length_ptr to token_of_ptr  fields of `SlotColumns`
    pair_count_ptr to salt_ptr  fields of `NgramTable`
    entry_mask                  entries of the table less 1
    """
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, offset = index // max_count, index % max_count
    in_range = index < size
    slot = tl.load(slot_ptr + row, mask=in_range, other=0).to(tl.int64)
    count = tl.load(count_ptr + row, mask=in_range, other=0)
    live = in_range & (offset < count)
    live = live & (tl.load(ended_ptr + slot, mask=live, other=1) == 0)
    position = tl.load(length_ptr + slot, mask=live, other=0) - count + offset
    page_table_row = page_table_ptr + slot * page_table_stride
    token = _token_at(page_table_row, token_of_ptr, position, live, PAGE)
    state = tl.load(salt_ptr + slot, mask=live, other=0)
    known = live
    predicted, best_count, best_total = _nothing_predicted(BLOCK)
    for i in tl.static_range(_MAX_CONTEXT):
        before = _token_at(page_table_row, token_of_ptr, position - 1 - i, live, PAGE)
        state = state * _TOKEN_MULTIPLIER + before + 1
        known = known & (before >= 0)
        if i & (i + 1) == 0:
            context = _hash_context(state, i + 1)
            entry = (context >> _CHECK_BITS) & entry_mask
            pair = _high_bits((context ^ token) * _PAIR_MULTIPLIER) & entry_mask
            if FIRST_PASS:
                predicted, best_count, best_total = _choose(
                    predicted, best_count, best_total, context, entry, known, total_ptr, best_ptr
                )
                tl.atomic_add(pair_count_ptr + pair, 1, mask=known, sem="relaxed")
            else:
                pair_count = tl.load(pair_count_ptr + pair, mask=known, other=0).to(tl.int64)
                counted = tl.minimum(pair_count, _MAX_COUNT) << _COUNT_SHIFT
                packed = counted | (token << _CHECK_BITS) | (context & _CHECK_MASK)
                tl.atomic_add(total_ptr + entry, 1, mask=known, sem="relaxed")
                tl.atomic_max(best_ptr + entry, packed, mask=known, sem="relaxed")
    if FIRST_PASS:
        tl.atomic_add(right_ptr + row, 1, mask=live & (predicted == token), sem="relaxed")


@triton.jit(
    do_not_specialize=["out_token_stride", "out_row_stride", "row_count", "count", "page_table_stride", "entry_mask"],
    do_not_specialize_on_alignment=["slot_ptr", "given_ptr", "out_ptr"],
)
def _predict_tokens_kernel(
    slot_ptr: tl.tensor,
    given_ptr: tl.tensor,
    out_ptr: tl.tensor,
    out_token_stride: tl.tensor,
    out_row_stride: tl.tensor,
    row_count: tl.tensor,
    count: tl.tensor,
    last_token_ptr: tl.tensor,
    length_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    page_table_stride: tl.tensor,
    token_of_ptr: tl.tensor,
    total_ptr: tl.tensor,
    best_ptr: tl.tensor,
    salt_ptr: tl.tensor,
    entry_mask: tl.tensor,
    DRAFTS: tl.constexpr,
    LENGTH_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Predict `count` tokens of BLOCK sequences, one per thread. Grid: `(⌈row_count / BLOCK⌉,)`.

    slot_ptr                        int32 [row_count], slot of each sequence; DRAFTS: [1 + count, row_count],
                                    `DraftRows.slot`. No sequence then gets more tokens than the program's longest draft
    given_ptr                       DRAFTS: int32 [1 + count, row_count], `DraftRows.given`
    out_ptr                         int64 [count, row_count], with two strides: result
    last_token_ptr to token_of_ptr  fields of `SlotColumns`
    total_ptr to salt_ptr           fields of `NgramTable`
    entry_mask                      entries of the table less 1
    LENGTH_BLOCK                    `count` at least
    """
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_range = rows < row_count
    slot = tl.load(slot_ptr + rows, mask=in_range, other=0).to(tl.int64)
    length = tl.load(length_ptr + slot, mask=in_range, other=0)
    salt = tl.load(salt_ptr + slot, mask=in_range, other=0)
    page_table_row = page_table_ptr + slot * page_table_stride
    token_1 = tl.load(last_token_ptr + slot, mask=in_range, other=0)
    token_2 = _token_at(page_table_row, token_of_ptr, length - 1, in_range, PAGE)
    token_3 = _token_at(page_table_row, token_of_ptr, length - 2, in_range, PAGE)
    token_4 = _token_at(page_table_row, token_of_ptr, length - 3, in_range, PAGE)
    token_5 = _token_at(page_table_row, token_of_ptr, length - 4, in_range, PAGE)
    token_6 = _token_at(page_table_row, token_of_ptr, length - 5, in_range, PAGE)
    token_7 = _token_at(page_table_row, token_of_ptr, length - 6, in_range, PAGE)
    token_8 = _token_at(page_table_row, token_of_ptr, length - 7, in_range, PAGE)
    if DRAFTS:
        count = _longest_draft(slot_ptr, rows, in_range, row_count, count, LENGTH_BLOCK)
    for step in range(count):
        state = salt
        known = in_range
        predicted, best_count, best_total = _nothing_predicted(BLOCK)
        window = (token_1, token_2, token_3, token_4, token_5, token_6, token_7, token_8)
        for i in tl.static_range(_MAX_CONTEXT):
            state = state * _TOKEN_MULTIPLIER + window[i] + 1
            known = known & (window[i] >= 0)
            if i & (i + 1) == 0:
                context = _hash_context(state, i + 1)
                entry = (context >> _CHECK_BITS) & entry_mask
                predicted, best_count, best_total = _choose(
                    predicted, best_count, best_total, context, entry, known, total_ptr, best_ptr
                )
        if DRAFTS:
            given = tl.load(given_ptr + (1 + step) * row_count + rows, mask=in_range, other=-1).to(tl.int64)
            predicted = tl.where(given >= 0, given, predicted)
        tl.store(out_ptr + step * out_token_stride + rows * out_row_stride, predicted, mask=in_range)
        token_8, token_7, token_6, token_5 = token_7, token_6, token_5, token_4
        token_4, token_3, token_2, token_1 = token_3, token_2, token_1, predicted


@triton.jit(
    do_not_specialize=["row_count", "draft_length"],
    do_not_specialize_on_alignment=["slot_ptr", "row_ptr", "draft_ptr", "accepted_ptr", "count_ptr"],
)
def _accept_drafts_kernel(
    slot_ptr: tl.tensor,
    row_ptr: tl.tensor,
    draft_ptr: tl.tensor,
    accepted_ptr: tl.tensor,
    count_ptr: tl.tensor,
    row_count: tl.tensor,
    draft_length: tl.tensor,
    last_token_ptr: tl.tensor,
    length_ptr: tl.tensor,
    ended_ptr: tl.tensor,
    LENGTH_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Accept the drafts of BLOCK sequences, one per thread. Grid: `(⌈row_count / BLOCK⌉,)`.

    slot_ptr, row_ptr            int32 [1 + draft_length, row_count], `DraftRows.slot` and `row`
    draft_ptr                    int64 [draft_length, row_count], drafted tokens
    accepted_ptr                 int32 [row_count], result: accepted tokens
    count_ptr                    int32 [decode rows], result: tokens by which each row advances its sequence
    last_token_ptr to ended_ptr  fields of `SlotColumns`
    LENGTH_BLOCK                 `draft_length` at least
    """
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_range = rows < row_count
    slot = tl.load(slot_ptr + rows, mask=in_range, other=0).to(tl.int64)
    last_token = tl.load(last_token_ptr + slot, mask=in_range, other=0)
    ended = tl.load(ended_ptr + slot, mask=in_range, other=1)
    longest = _longest_draft(slot_ptr, rows, in_range, row_count, draft_length, LENGTH_BLOCK)
    accepted = tl.zeros([BLOCK], tl.int32)
    going = in_range
    for i in range(longest):
        lent = tl.load(slot_ptr + (1 + i) * row_count + rows, mask=in_range, other=-1).to(tl.int64)
        lent_row = tl.load(row_ptr + (1 + i) * row_count + rows, mask=in_range, other=-1)
        tl.store(count_ptr + lent_row, tl.zeros([BLOCK], tl.int32), mask=in_range & (lent_row >= 0))
        draft = tl.load(draft_ptr + i * row_count + rows, mask=going, other=0)
        going = going & (lent >= 0) & (draft == last_token) & (ended == 0)
        last_token = tl.where(going, tl.load(last_token_ptr + lent, mask=going, other=0), last_token)
        ended = tl.where(going, tl.load(ended_ptr + lent, mask=going, other=0), ended)
        accepted += going.to(tl.int32)
    advanced = accepted > 0
    length = tl.load(length_ptr + slot, mask=advanced, other=0)
    tl.store(length_ptr + slot, length + accepted, mask=advanced)
    tl.store(last_token_ptr + slot, last_token, mask=advanced)
    tl.store(ended_ptr + slot, ended, mask=advanced)
    tl.store(accepted_ptr + rows, accepted, mask=in_range)
    row = tl.load(row_ptr + rows, mask=in_range, other=-1)
    tl.store(count_ptr + row, 1 + accepted, mask=row >= 0)


@triton.jit
def _longest_draft(
    slot_ptr: tl.tensor,
    rows: tl.tensor,
    in_range: tl.tensor,
    row_count: tl.tensor,
    draft_length: tl.tensor,
    LENGTH_BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return the most drafted tokens of any of these sequences; `slot_ptr` is `DraftRows.slot`."""
    i = tl.arange(0, LENGTH_BLOCK)[:, None]
    exists = (i < draft_length) & in_range[None, :]
    lent = tl.load(slot_ptr + (1 + i) * row_count + rows[None, :], mask=exists, other=-1)
    return tl.max(tl.sum((lent >= 0).to(tl.int32), 0), 0)


@triton.jit
def _token_at(
    page_table_row: tl.tensor, token_of_ptr: tl.tensor, position: tl.tensor, in_range: tl.tensor, PAGE: tl.constexpr
) -> tl.tensor:
    """Return the cached token at a position of each slot, int64; _NO_TOKEN before the start of the sequence."""
    in_range = in_range & (position >= 0)
    page = tl.load(page_table_row + position // PAGE, mask=in_range, other=0).to(tl.int64)
    return tl.load(token_of_ptr + page * PAGE + position % PAGE, mask=in_range, other=_NO_TOKEN)


@triton.jit
def _high_bits(mixed: tl.tensor) -> tl.tensor:
    return (mixed >> 32) & 0xFFFFFFFF


@triton.jit
def _hash_context(state: tl.tensor, LENGTH: tl.constexpr) -> tl.tensor:
    """Return the hash of a context of LENGTH tokens, which are hashed to `state`."""
    mixed = (state ^ LENGTH) * _CONTEXT_MULTIPLIER
    return mixed ^ _high_bits(mixed)


@triton.jit
def _nothing_predicted(BLOCK: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return what `_choose` takes before the first context: no token, with the share 0 / 1."""
    zero = tl.zeros([BLOCK], tl.int64)
    return zero + _NO_TOKEN, zero, zero + 1


@triton.jit
def _choose(
    token: tl.tensor,
    best_count: tl.tensor,
    best_total: tl.tensor,
    context: tl.tensor,
    entry: tl.tensor,
    known: tl.tensor,
    total_ptr: tl.tensor,
    best_ptr: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the best token of a context, its count and its total + 1, where its share is not less than the one before.

    Shorter contexts come first, so that the longer one decides if shares are equal.
    """
    packed = tl.load(best_ptr + entry, mask=known, other=0)
    total = tl.load(total_ptr + entry, mask=known, other=0).to(tl.int64) + 1
    count = packed >> _COUNT_SHIFT
    same_context = (count > 0) & ((packed & _CHECK_MASK) == (context & _CHECK_MASK))
    better = same_context & (count * best_total >= best_count * total)
    token = tl.where(better, (packed >> _CHECK_BITS) & _TOKEN_MASK, token)
    return token, tl.where(better, count, best_count), tl.where(better, total, best_total)
