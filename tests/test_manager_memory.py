"""A manager's memory does not grow with the number of finished requests."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator

import pytest

from support.many_requests import ManyRequests
from support.schedules import assert_all_given_back, check

FIRST, MORE = 2000, 4000  # requests; with fewer, the growth of dictionaries counts as a leak
MIN_LEAK_BYTES = 16  # bytes a request: a number in a list takes 36


@pytest.fixture
def _traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def held() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@pytest.mark.usefixtures("_traced")
def test_manager_memory_does_not_grow_with_finished_requests() -> None:
    many = ManyRequests(slots=256)
    many.run(FIRST)
    many.end()
    before = held()
    many.run(MORE)
    many.end()
    assert held() - before < MIN_LEAK_BYTES * MORE
    manager = many.simulation.manager
    assert manager.output_processor.requests_finished > 0.9 * (FIRST + MORE)
    check(manager)
    assert_all_given_back(manager)
