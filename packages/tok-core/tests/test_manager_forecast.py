"""The page forecast equals a step-by-step simulation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tok_core.manager.admission import forecast
from tok_core.manager.admission.forecast import PageDemand, admissible, usage


@st.composite
def demands(draw: st.DrawFn, page_size: int, most: int = 12) -> PageDemand:
    """Draw lengths, remaining tokens and shared pages of some sequences."""
    rows = []
    for _ in range(draw(st.integers(0, most))):
        tokens = draw(st.integers(1, 70))
        rows.append((tokens, draw(st.integers(0, 50)), draw(st.integers(0, -(-tokens // page_size)))))
    return PageDemand(*np.array(rows, np.int64).reshape(-1, 3).T)


page_sizes = st.integers(1, 20)


def peak_pages(demand: PageDemand, page_size: int) -> int:
    """Return the most pages that the sequences ever need together: page use peaks only where one of them finishes."""
    return int(usage(demand, np.unique(demand.remaining), page_size).max(initial=0))


def simulated_peak(demand: PageDemand, page_size: int) -> int:
    """Return the most pages needed at any step."""
    length, remaining, shared = demand
    peak = 0
    for t in range(int(remaining.max(initial=-1)) + 1):
        runs = remaining >= t
        peak = max(peak, int((-(-(length[runs] + t) // page_size) - shared[runs]).sum()))
    return peak


def joined(running: PageDemand, waiting: PageDemand, count: int) -> PageDemand:
    return PageDemand(*(np.concatenate((a, b[:count])) for a, b in zip(running, waiting, strict=True)))


@given(st.data(), page_sizes)
def test_peak_pages_equals_the_simulated_peak(data: st.DataObject, page_size: int) -> None:
    demand = data.draw(demands(page_size))
    assert peak_pages(demand, page_size) == simulated_peak(demand, page_size)


@given(st.data(), page_sizes, st.integers(0, 150))
def test_admissible_count_equals_the_simulated_maximum(data: st.DataObject, page_size: int, capacity: int) -> None:
    running, waiting = data.draw(demands(page_size)), data.draw(demands(page_size))
    bearable = [
        count
        for count in range(len(waiting[0]) + 1)
        if simulated_peak(joined(running, waiting, count), page_size) <= capacity
    ]
    assert admissible(running, waiting, capacity, page_size) == max(bearable, default=0)


@given(st.data(), page_sizes, st.integers(0, 150), st.integers(0, 4))
def test_admissible_keeps_the_reserve_free_unless_all_samples_fit(
    data: st.DataObject, page_size: int, capacity: int, slope: int
) -> None:
    running, waiting = data.draw(demands(page_size)), data.draw(demands(page_size))
    last = max(int(columns[1].max(initial=0)) for columns in (running, waiting))

    def bears(count: int) -> bool:
        length, remaining, shared = joined(running, waiting, count)
        return all(
            int((-(-(length + t) // page_size) - shared)[remaining >= t].sum()) + slope * t <= capacity
            for t in range(last + 1)
        )

    length, remaining, shared = joined(running, waiting, len(waiting[0]))
    if int((-(-(length + remaining) // page_size) - shared).sum()) <= capacity:
        most = len(waiting[0])
    else:
        most = max((count for count in range(len(waiting[0]) + 1) if bears(count)), default=0)
    assert admissible(running, waiting, capacity, page_size, lambda moments: slope * moments) == most


@given(st.data(), page_sizes, st.integers(0, 150), st.integers(1, 4))
def test_admissible_admits_candidates_in_whole_blocks(
    data: st.DataObject, page_size: int, capacity: int, block_size: int
) -> None:
    running, some = data.draw(demands(page_size)), data.draw(demands(page_size, most=5))
    waiting = PageDemand(*(np.tile(column, block_size) for column in some))
    each = admissible(running, waiting, capacity, page_size)
    assert admissible(running, waiting, capacity, page_size, block_size=block_size) == each // block_size * block_size


def test_forecast_treats_far_future_finishes_like_near_ones() -> None:
    random = np.random.default_rng(0)
    length, remaining = random.integers(1, 300, 40), random.integers(0, 900, 40)
    near = PageDemand(length, remaining, np.zeros(40, np.int64))
    far = PageDemand(np.array([5]), np.array([3 * forecast.NEAR]), np.array([0]))
    needed = peak_pages(joined(near, far, 1), 16)
    assert needed == 12_289  # pages of the far sequence at its end
    for capacity in range(200, 700, 20):
        alone = admissible(near, near, capacity, 16)
        assert admissible(near, joined(near, far, 1), capacity, 16) == alone


@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_peak_pages_is_exact_for_thousands_of_sequences(page_size: int) -> None:
    random = np.random.default_rng(page_size)
    length, remaining = random.integers(1, 3000, 4000), random.integers(0, 900, 4000)
    demand = PageDemand(length, remaining, random.integers(0, length // page_size + 1))
    assert peak_pages(demand, page_size) == simulated_peak(demand, page_size)


def test_candidate_that_does_not_fit_blocks_smaller_ones_behind_it() -> None:
    none = np.empty(0, np.int64)
    waiting = PageDemand(np.array([10, 1000, 10]), np.array([6, 6, 6]), np.array([0, 0, 0]))
    assert admissible(PageDemand(none, none, none), waiting, 10, 16) == 1


def test_peak_pages_excludes_shared_pages() -> None:
    length, remaining = np.array([33]), np.array([15])
    assert peak_pages(PageDemand(length, remaining, np.array([0])), 16) == 3
    assert peak_pages(PageDemand(length, remaining, np.array([2])), 16) == 1
    assert peak_pages(PageDemand(length, remaining + 1, np.array([2])), 16) == 2
