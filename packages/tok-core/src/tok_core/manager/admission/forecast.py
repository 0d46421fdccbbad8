"""Forecast: KV pages over future time, in closed form over the moments at which sequences finish.

A sequence of `length` tokens that runs `remaining` more of them, of whose pages `shared` are counted elsewhere,
needs ceil((length + t) / page_size) − shared pages after t steps, for t = 0 … remaining, and none after that.
Between two finishes nobody leaves and everybody grows, so use can only peak at the moments t = remaining_k.

Legend: n sequences, M moments, P page_size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tok_core.messages import Int64

Reserve = Callable[[Int64], Int64]
"""Pages to leave free at `moments`, steps from now: int64 [M] of int64 [M] ascending.

It is asked of the moments alone at which sequences finish, so it holds at these. What a reserve that falls with time
wants between two of them, or before the first, goes unheard but for what it still wants at the later one.
"""

NEAR = 1 << 16  # steps from now up to which moments are found by a mark for each step


class _Growth(NamedTuple):
    """Sequences as they fill pages, int64 [n] each.

    now      pages of their own with the next token in the cache, if that begins no page
    lacking  tokens more after which the last of these is full: below P
    until    of the moments asked about, the first so many are those at which they still run
    """

    now: Int64
    lacking: Int64
    until: Int64

    def first(self, count: int) -> _Growth:
        return _Growth(self.now[:count], self.lacking[:count], self.until[:count])


def peak_pages(length: Int64, remaining: Int64, shared: Int64, page_size: int) -> int:
    """The most pages that the sequences, int64 [n] each, ever need together; 0 for none. Exact."""
    if not len(length):
        return 0
    return int(usage(length, remaining, shared, page_size, np.unique(remaining)).max())


def usage(length: Int64, remaining: Int64, shared: Int64, page_size: int, moments: Int64) -> Int64:
    """Pages needed at each of `moments`, int64 [M] ascending."""
    until = np.searchsorted(moments, remaining, side="right")
    return _usage(_growth(length, shared, until, page_size), moments, page_size)


def admissible(
    length: Int64,
    remaining: Int64,
    shared: Int64,
    cand_length: Int64,
    cand_remaining: Int64,
    cand_shared: Int64,
    capacity: int,
    page_size: int,
    reserve: Reserve | None = None,
    together: int = 1,
) -> int:
    """How many candidates, in strict order, may start now with the peak of all that run staying within `capacity`.

    All of them may, whatever `reserve` wants to be left free for later ones, where they fit even if everybody has its
    most pages at once. Of candidates that come so many `together`, as which m has to be a multiple of it, all may start
    or none.

    The largest k such that the running sequences, int64 [n], and the first k candidates, int64 [m], never need
    more than `capacity` pages; 0 where the running ones alone do. Found by search: a sequence never needs less
    than 0 pages (shared ≤ its pages), so one candidate more lowers the use at no time and hence not the peak.
    """
    most = _sum_of_peaks(length, remaining, shared, page_size)
    if most + _sum_of_peaks(cand_length, cand_remaining, cand_shared, page_size) <= capacity:
        return len(cand_length)
    moments, until = _moments(np.concatenate((remaining, cand_remaining)))
    spare = capacity - _usage(_growth(length, shared, until[: len(length)], page_size), moments, page_size)
    if reserve is not None:
        spare -= reserve(moments)
    if (spare < 0).any():
        return 0
    candidates = _growth(cand_length, cand_shared, until[len(length) :], page_size)
    return together * _search(candidates, moments, spare, page_size, together)


def _search(candidates: _Growth, moments: Int64, spare: Int64, page_size: int, together: int) -> int:
    """How many times as many candidates as come `together` fit into `spare` pages at each of the moments.

    Where some are too many, the share of them that would fit if all were alike is tried next, and where that does, one
    more; half of what is left to be tried where that has not ended the search.
    """
    low, high = 0, len(candidates.now) // together + 1  # `low` fit, or none do; `high` do not, or are too many
    k, streak = high - 1, 0  # the last so many that were tried had the same answer
    while high - low > 1:
        # Moments at which none of these finishes are looked at too: only a reserve makes these count.
        added = _usage(candidates.first(k * together), moments, page_size)
        over = added > spare
        if over.any():  # only where k are too many can fewer be
            streak, high = max(streak, 0) + 1, k
            moments, spare = moments[over], spare[over]
            candidates = candidates._replace(until=np.append(0, np.cumsum(over))[candidates.until])
            guess = int(k * float((spare / added[over]).min()))
        else:
            streak, low, guess = min(streak, 0) - 1, k, k + 1
        k = (low + high) // 2 if abs(streak) > 1 else min(max(guess, low + 1), high - 1)
    return low


def _moments(remaining: Int64) -> tuple[Int64, Int64]:
    """The distinct ones of `remaining`, int64 [M] ascending, and for each how many of these are not above it, [n]."""
    if remaining.max(initial=0) >= NEAR:
        moments, place = np.unique(remaining, return_inverse=True)
        return moments, place + 1
    there = np.zeros(int(remaining.max(initial=0)) + 1, np.bool_)
    there[remaining] = True
    return there.nonzero()[0], np.cumsum(there, dtype=np.int64)[remaining]


def _growth(length: Int64, shared: Int64, until: Int64, page_size: int) -> _Growth:
    full, used = np.divmod(length - 1, page_size)
    return _Growth(full + 1 - shared, page_size - 1 - used, until)


def _usage(growth: _Growth, moments: Int64, page_size: int) -> Int64:
    """Pages needed at each of `moments`, int64 [M].

    With t = Q · P + s, a sequence has Q pages more than now after t steps, and one more if it lacks fewer than s
    tokens: the sums over all that still run are sums over the tail of a table with a row for each moment.
    """
    turns, steps = np.divmod(moments, page_size)
    rows = len(moments) + 1
    cells = np.bincount(growth.until * page_size + growth.lacking, minlength=rows * page_size)
    # Row i, column s: how many run at moment i and no longer than that lack at most s tokens.
    lacking = _tail_sums(np.cumsum(cells.reshape(rows, page_size)[1:], axis=1))
    crossed = np.where(steps > 0, lacking[np.arange(rows - 1), steps - 1], 0)
    now = _tail_sums(np.bincount(growth.until, growth.now, rows)[1:])  # exact: far below 2 ** 53
    pages: Int64 = now.astype(np.int64) + lacking[:, -1] * turns + crossed
    return pages


def _sum_of_peaks(length: Int64, remaining: Int64, shared: Int64, page_size: int) -> int:
    """Pages that are enough whenever the sequences end: each has its most at the end. Quicker found than the peak."""
    return int((-(-(length + remaining) // page_size) - shared).sum())


def _tail_sums(values: np.ndarray) -> np.ndarray:
    """Row i is the sum of values[i:]."""
    return np.cumsum(values[::-1], axis=0)[::-1]
