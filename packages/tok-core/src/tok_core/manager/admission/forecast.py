"""Forecast KV pages over future time, in closed form over the moments at which sequences finish.

After t steps, a sequence needs ceil((length + t) / page_size) − shared pages, for t = 0 … remaining, and none after
that (`PageDemand`). Between two finishes all sequences grow and none ends, so page use can only peak at the moments
t = remaining_k.

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


class PageDemand(NamedTuple):
    """Sequences that need pages: int64 [n] each.

    length     tokens that a sequence has now
    remaining  tokens that it still runs
    shared     its pages that are counted elsewhere; no more than it has
    """

    length: Int64
    remaining: Int64
    shared: Int64

    def at_end(self, page_size: int) -> Int64:
        """Return the pages that each sequence needs at its end, when it needs most."""
        return -(-(self.length + self.remaining) // page_size) - self.shared


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


def usage(demand: PageDemand, moments: Int64, page_size: int) -> Int64:
    """Return the pages needed at each of `moments`, int64 [M] ascending."""
    until = np.searchsorted(moments, demand.remaining, side="right")
    return _usage(_growth(demand, until, page_size), moments, page_size)


def admissible(
    running: PageDemand,
    candidates: PageDemand,
    capacity: int,
    page_size: int,
    reserve: Reserve | None = None,
    block_size: int = 1,
) -> int:
    """Return how many candidates, in strict order, may start now with the peak of all staying within `capacity`.

    The result is the largest k such that the running sequences and the first k candidates never need more than
    `capacity` pages; 0 if the running ones alone do. `reserve` lowers the capacity at future moments. All candidates
    may start, whatever the reserve, if they fit even when every sequence has its most pages at once. Candidates are
    admitted in blocks of `block_size`, of which their number is a multiple.

    The largest k is found by search, since the peak never falls with k: no sequence needs fewer than 0 own pages.
    """
    # Faster than the peak, and often enough: the pages that suffice whenever the sequences end.
    if running.at_end(page_size).sum() + candidates.at_end(page_size).sum() <= capacity:
        return len(candidates.length)
    moments, until = _moments(np.concatenate((running.remaining, candidates.remaining)))
    until_running, until_candidates = np.split(until, [len(running.length)])
    spare = capacity - _usage(_growth(running, until_running, page_size), moments, page_size)
    if reserve is not None:
        spare -= reserve(moments)
    if (spare < 0).any():
        return 0
    growth = _growth(candidates, until_candidates, page_size)
    return block_size * _fitting_blocks(growth, moments, spare, page_size, block_size)


def _fitting_blocks(candidates: _Growth, moments: Int64, spare: Int64, page_size: int, block_size: int) -> int:
    """Return how many blocks of `block_size` candidates fit into `spare` pages at each of the moments.

    If k blocks do not fit, the next try is the share of them that would fit if all were alike. If k blocks fit, it is
    k + 1. After two equal answers in a row, the remaining range is bisected.
    """
    low, high = 0, len(candidates.now) // block_size + 1  # `low` blocks fit, or it is 0; `high` do not, or do not exist
    k, streak = high - 1, 0  # number of equal answers in a row: positive if too many, negative if they fit
    while high - low > 1:
        # Moments at which none of the k blocks finishes are included; they matter only with a reserve.
        added = _usage(candidates.first(k * block_size), moments, page_size)
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


def _growth(demand: PageDemand, until: Int64, page_size: int) -> _Growth:
    """Return the growth of sequences that run at the first `until` moments, int64 [n]."""
    full, used = np.divmod(demand.length - 1, page_size)
    return _Growth(full + 1 - demand.shared, page_size - 1 - used, until)


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


def _tail_sums(values: np.ndarray) -> np.ndarray:
    """Return an array whose row i is the sum of values[i:]."""
    return np.cumsum(values[::-1], axis=0)[::-1]
