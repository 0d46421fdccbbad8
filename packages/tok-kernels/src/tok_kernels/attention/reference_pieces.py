"""Cut a step's attention into pieces: batches of items, padded to the same number of queries and of keys.

All sizes are host numbers, so nothing in this module waits for a CUDA device. On the CPU, the caller's upper bounds are
first replaced by the true lengths. Axes: N items of a piece (sequences or prefix groups), Q queries of an item, T query
tokens of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tok_kernels.batch import AttentionBatch, CascadeLevel

# Maximum elements of a piece's scores or keys. On a CPU, pieces that fit its cache take half the time of large ones,
# because the allocator reuses their memory without page faults. On other devices the limit only bounds the memory.
_MAX_CPU_ELEMENTS = 1 << 20
_MAX_ELEMENTS = 1 << 26
_BEYOND = 1 << 40  # greater than every position


@dataclass(frozen=True, slots=True)
class Piece:
    """Queries of N items; the queries of item `i` attend to the keys from position `start_N[i]` on.

    token_NQ         int64  index among the step's T query tokens; T where padded
    slot_N           int64  slot whose page table finds the keys
    start_N          int64  first position of the keys
    limit_NQ         int64  end of the positions that the query sees; 0 where padded
    window_start_NQ  int64  first position of the query's window; None without a window
    width                   host-side upper bound of the number of positions from `start_N` on that any query sees
    """

    token_NQ: Tensor
    slot_N: Tensor
    start_N: Tensor
    limit_NQ: Tensor
    window_start_NQ: Tensor | None
    width: int


@dataclass(frozen=True, slots=True)
class _Items:
    """N items before padding; item `i` has `count[i]` queries from token `first[i]` on, over keys `[start[i], end[i])`.

    If `length_T` is None, items are causal: the last query sees all keys, and each query before it sees one key less.
    Otherwise each query sees all keys within its window, which ends with the `length_T` positions of its sequence.
    """

    first: Tensor
    count: Tensor
    slot: Tensor
    start: Tensor
    end: Tensor
    length_T: Tensor | None

    def __getitem__(self, index: slice) -> _Items:
        return _Items(
            first=self.first[index],
            count=self.count[index],
            slot=self.slot[index],
            start=self.start[index],
            end=self.end[index],
            length_T=self.length_T,
        )


def sequence_pieces(
    batch: AttentionBatch, tokens: int, heads: int, row_size: int, window: int | None
) -> Iterator[Piece]:
    """Yield pieces in which every query attends to its own sequence's keys: first decode rows, then prefill chunks.

    `heads` is H and `row_size` is K × D; both serve to bound the elements of a piece.
    """
    q_start = batch.q_start.long()
    start, end, count = batch.kv_start.long(), batch.kv_len.long(), q_start.diff()
    if window is not None:  # the first query's window is the earliest
        start = torch.maximum(start, end - count + 1 - window)
    items = _Items(q_start[:-1], count, batch.slots.long(), start, end, length_T=None)
    decode, prefill = items[: batch.num_decode], items[batch.num_decode :]
    for phase_items, max_q in ((decode, 1), (prefill, batch.max_q)):
        max_kv = batch.max_kv if window is None else min(batch.max_kv, window + max_q - 1)
        yield from _pieces(phase_items, max_q, max_kv, tokens, heads, row_size, window)


def cascade_pieces(
    level: CascadeLevel, batch: AttentionBatch, tokens: int, heads: int, row_size: int, window: int | None
) -> Iterator[Piece]:
    """Yield pieces in which the decode rows of each group attend to their shared keys.

    `heads` and `row_size` are those of `sequence_pieces`.
    """
    items = _Items(
        first=level.row_start.long(),  # decode row b is query token b
        count=level.row_count.long(),
        slot=level.slot.long(),
        start=level.kv_start.long(),
        end=level.kv_end.long(),
        length_T=batch.kv_len.long(),
    )
    yield from _pieces(items, level.max_rows, level.max_kv, tokens, heads, row_size, window)


def _pieces(
    items: _Items, max_q: int, max_kv: int, tokens: int, heads: int, row_size: int, window: int | None
) -> Iterator[Piece]:
    """Yield pieces of at most `max_elements`; the queries of an item that alone exceeds this are split."""
    total = items.first.shape[0]
    if total == 0:
        return
    max_elements = _MAX_CPU_ELEMENTS if items.first.device.type == "cpu" else _MAX_ELEMENTS
    max_q, max_kv = _tight_bound("max_q", items.count, max_q), _tight_bound("max_kv", items.end - items.start, max_kv)
    step = max(1, max_elements // max(max_kv * heads * max_q, max_kv * row_size, 1))
    for begin in range(0, total, step):
        piece_items = items[begin : begin + step]
        piece_q = _tight_bound("max_q", piece_items.count, max_q)
        width = _tight_bound("max_kv", piece_items.end - piece_items.start, max_kv)
        q_step = max(1, max_elements // max(width * heads, 1))
        for q_begin in range(0, piece_q, q_step):
            yield _padded(piece_items, range(q_begin, min(q_begin + q_step, piece_q)), width, tokens, window)


def _padded(items: _Items, queries: range, width: int, tokens: int, window: int | None) -> Piece:
    """Return the piece of these items' `queries`, padded to the same number of queries and keys."""
    query = torch.arange(queries.start, queries.stop, device=items.first.device)
    count, end = items.count.unsqueeze(-1), items.end.unsqueeze(-1)
    present = query < count
    token = torch.where(present, items.first.unsqueeze(-1) + query, tokens)
    limit = end - count + query + 1 if items.length_T is None else end
    start, window_start = items.start, None
    if window is not None:
        window_start, live = limit - window, present
        if items.length_T is not None:
            length = items.length_T[token.clamp(max=len(items.length_T) - 1)]
            window_start, live = length - window, present & (length > 0)  # rows of ended sequences need no keys
        start = torch.maximum(start, torch.where(live, window_start, _BEYOND).amin(-1))
        if items.length_T is None:
            width = min(width, window + len(queries) - 1)
        else:
            width = _tight_bound("max_kv", items.end - start, width)
    return Piece(
        token_NQ=token,
        slot_N=items.slot,
        start_N=start,
        limit_NQ=torch.where(present, limit, 0),
        window_start_NQ=window_start,
        width=max(width, 1),
    )


def _tight_bound(name: str, lengths: Tensor, bound: int) -> int:
    """Return the largest length if the lengths are on the CPU; otherwise the bound, since reading would synchronise.

    Raises ValueError if the lengths are on the CPU and the largest exceeds the bound.
    """
    if lengths.device.type != "cpu":
        return bound
    largest = int(lengths.max())
    if largest > bound:
        raise ValueError(f"{name} is {bound}; allowed: at least {largest}, which the step holds")
    return largest
