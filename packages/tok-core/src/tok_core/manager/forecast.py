"""Forecast: KV pages over future time, in closed form over sorted finish times.

A sequence of `length` tokens that runs `remaining` more of them, of whose pages `shared` are counted elsewhere,
needs ceil((length + t) / page_size) − shared pages after t steps, for t = 0 … remaining, and none after that.
Between two finishes nobody leaves and everybody grows, so use can only peak at the moments t = remaining_k.

Legend: n sequences, M moments, P page_size.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tok_core.messages import Int64

Reserve = Callable[[Int64], Int64]
"""Pages to leave free at `moments`, steps from now: int64 [M] of int64 [M] ascending.

It is asked of the moments alone at which sequences finish, so it holds at these. What a reserve that falls with time
wants between two of them, or before the first, goes unheard but for what it still wants at the later one.
"""

TABLE = 1 << 15  # entries, at most, of the table of page crossings


def peak_pages(length: Int64, remaining: Int64, shared: Int64, page_size: int) -> int:
    """The most pages that the sequences, int64 [n] each, ever need together; 0 for none. Exact."""
    if not len(length):
        return 0
    return int(usage(length, remaining, shared, page_size, np.unique(remaining)).max())


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
) -> int:
    """How many candidates, in strict order, may start now with the peak of all that run staying within `capacity`.

    All of them may, whatever `reserve` wants to be left free for later ones, where they fit even if everybody has its
    most pages at once.

    The largest k such that the running sequences, int64 [n], and the first k candidates, int64 [m], never need
    more than `capacity` pages; 0 where the running ones alone do. Found by bisection: a sequence never needs less
    than 0 pages (shared ≤ its pages), so one candidate more lowers the use at no time and hence not the peak.
    """
    most = _sum_of_peaks(length, remaining, shared, page_size)
    if most + _sum_of_peaks(cand_length, cand_remaining, cand_shared, page_size) <= capacity:
        return len(cand_length)
    moments = np.unique(np.concatenate((remaining, cand_remaining)))
    running = usage(length, remaining, shared, page_size, moments)
    if reserve is not None:
        running += reserve(moments)
    low, high = -1, len(cand_length) + 1  # `low` fit or are none at all, `high` do not or are too many
    k = len(cand_length)
    while high - low > 1:
        # Moments at which none of these finishes are looked at too: only a reserve makes these count.
        added = usage(cand_length[:k], cand_remaining[:k], cand_shared[:k], page_size, moments)
        over = running + added > capacity
        if over.any():  # only where k are too many can fewer be
            high, moments, running = k, moments[over], running[over]
        else:
            low = k
        k = (low + high) // 2
    return max(low, 0)


def usage(length: Int64, remaining: Int64, shared: Int64, page_size: int, moments: Int64) -> Int64:
    """Pages needed at each of `moments`, int64 [M] ascending.

    With length − 1 = q · P + c and t = Q · P + s, a sequence has q + 1 + Q + [c ≥ P − s] pages after t steps: the
    sums over all that still run are sums over a tail of the finish times, the last one a tail's count for each s.
    """
    order = np.argsort(remaining)
    first = np.searchsorted(remaining[order], moments)  # the sequences order[first:] still run
    full, used = np.divmod(length[order] - 1, page_size)
    turns, steps = np.divmod(moments, page_size)
    pages = _tail_sums(full + 1 - shared[order])[first]
    pages += (len(order) - first) * turns + _crossed(used, first, steps, page_size)
    return pages


def _sum_of_peaks(length: Int64, remaining: Int64, shared: Int64, page_size: int) -> int:
    """Pages that are enough whenever the sequences end: each has its most at the end. Quicker found than the peak."""
    return int((-(-(length + remaining) // page_size) - shared).sum())


def _crossed(used: Int64, first: Int64, steps: Int64, page_size: int) -> Int64:
    """For each moment, how many of used[first:] reach P after `steps` more.

    Looked up in a table of the answers for every stride-th `first`; the sequences before that are compared singly.
    """
    stride = max(1, len(used) * page_size // TABLE)
    rows = -(-len(used) // stride)
    lacking = np.arange(len(used)) // stride * page_size + (page_size - 1 - used)
    table = np.zeros((rows + 1, page_size), np.int64)
    counts = np.bincount(lacking, minlength=rows * page_size).reshape(rows, page_size)
    table[:-1, 1:] = np.cumsum(_tail_sums(counts)[:-1, :-1], axis=1)
    row = -(-first // stride)
    crossed: Int64 = table[row, steps]
    until = np.minimum(row * stride, len(used))
    for skipped in range(stride - 1):
        at = np.flatnonzero(first + skipped < until)
        crossed[at] += used[first[at] + skipped] + steps[at] >= page_size
    return crossed


def _tail_sums(values: np.ndarray) -> Int64:
    """Row i is the sum of values[i:], for i = 0 … n."""
    sums = np.zeros((len(values) + 1, *values.shape[1:]), np.int64)
    np.cumsum(values[::-1], axis=0, out=sums[1:])
    return sums[::-1]
