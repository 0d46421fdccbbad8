"""Forecast KV pages over future time, in closed form over the moments at which sequences finish.

A sequence has `length` tokens and runs `remaining` more of them; `shared` of its pages are counted elsewhere. After t
steps it needs ceil((length + t) / page_size) − shared pages, for t = 0 … remaining, and none after that. Between two
finishes all sequences grow and none ends, so page use can only peak at the moments t = remaining_k.

Legend: n sequences, M moments, P page_size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tok_core.messages import Int64

Reserve = Callable[[Int64], Int64]
"""Pages to leave free at `moments`, steps from now: int64 [M] of int64 [M] ascending.

A reserve is evaluated, and holds, only at moments at which sequences finish. If it falls with time, its higher values
between two of these moments, or before the first, have no effect; only the value at the later moment counts.
"""

NEAR = 1 << 16  # steps from now below which moments are found with one mark per step


class _Growth(NamedTuple):
    """Growth of sequences in pages, int64 [n] each.

    now      own pages that hold `length` tokens
    lacking  tokens that still fit into the last of these: below P
    until    number of moments, the first ones of those asked about, at which the sequence still runs
    """

    now: Int64
    lacking: Int64
    until: Int64

    def first(self, count: int) -> _Growth:
        return _Growth(self.now[:count], self.lacking[:count], self.until[:count])


def usage(length: Int64, remaining: Int64, shared: Int64, page_size: int, moments: Int64) -> Int64:
    """Return the pages needed at each of `moments`, int64 [M] ascending."""
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
    """Return how many candidates, in strict order, may start now with the peak of all staying within `capacity`.

    The result is the largest k such that the running sequences, int64 [n], and the first k candidates, int64 [m], never
    need more than `capacity` pages; 0 if the running ones alone do. `reserve` lowers the capacity at future moments.
    All candidates may start, whatever the reserve, if they fit even when every sequence has its most pages at once.
    Candidates are admitted in blocks of `together`; m is a multiple of it.

    The largest k is found by search, since the peak never falls with k: no sequence needs fewer than 0 pages of its own
    (shared ≤ its pages).
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
    """Return how many blocks of `together` candidates fit into `spare` pages at each of the moments.

    If k blocks do not fit, the next try is the share of them that would fit if all were alike. If k blocks fit, it is
    k + 1. After two equal answers in a row, the remaining range is bisected.
    """
    low, high = 0, len(candidates.now) // together + 1  # `low` blocks fit, or it is 0; `high` do not, or do not exist
    k, streak = high - 1, 0  # number of equal answers in a row: positive if too many, negative if they fit
    while high - low > 1:
        # Moments at which none of the k blocks finishes are included; they matter only with a reserve.
        added = _usage(candidates.first(k * together), moments, page_size)
        over = added > spare
        if over.any():  # fewer blocks can be too many only where k are
            streak, high = max(streak, 0) + 1, k
            moments, spare = moments[over], spare[over]
            candidates = candidates._replace(until=np.append(0, np.cumsum(over))[candidates.until])
            guess = int(k * float((spare / added[over]).min()))
        else:
            streak, low, guess = min(streak, 0) - 1, k, k + 1
        k = (low + high) // 2 if abs(streak) > 1 else min(max(guess, low + 1), high - 1)
    return low


def _moments(remaining: Int64) -> tuple[Int64, Int64]:
    """Return the distinct values of `remaining`, int64 [M] ascending, and how many of them each value reaches, [n].

    [5, 2, 5] gives the moments [2, 5] and the counts [2, 1, 2].
    """
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
    """Return the pages needed at each of `moments`, int64 [M].

    Let t = Q · P + s. After t steps, a sequence has Q pages more than now, and another one if it lacks fewer than s
    tokens. Sums over all sequences that still run are tail sums of a table with a row for each moment.

    P = 16, t = 20 = 1 · 16 + 4: one page more, and a second one if the last page lacks 0 to 3 tokens
    """
    turns, steps = np.divmod(moments, page_size)
    rows = len(moments) + 1
    cells = np.bincount(growth.until * page_size + growth.lacking, minlength=rows * page_size)
    # Row i, column s: how many of the sequences that run at moment i lack at most s tokens.
    lacking = _tail_sums(np.cumsum(cells.reshape(rows, page_size)[1:], axis=1))
    crossed = np.where(steps > 0, lacking[np.arange(rows - 1), steps - 1], 0)
    now = _tail_sums(np.bincount(growth.until, growth.now, rows)[1:])  # exact: far below 2 ** 53
    pages: Int64 = now.astype(np.int64) + lacking[:, -1] * turns + crossed
    return pages


def _sum_of_peaks(length: Int64, remaining: Int64, shared: Int64, page_size: int) -> int:
    """Return the pages that suffice whenever the sequences end: the sum of each one's most. Faster than the peak."""
    return int((-(-(length + remaining) // page_size) - shared).sum())


def _tail_sums(values: np.ndarray) -> np.ndarray:
    """Return an array whose row i is the sum of values[i:]."""
    return np.cumsum(values[::-1], axis=0)[::-1]
