"""Count what one rendering of a template costs, roughly in bytes, and estimate the size of values."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from jinja2.exceptions import SecurityError

MAX_RENDER_BYTES = 1 << 28  # bytes charged to one rendering
MAX_VALUE_BYTES = 1 << 26  # bytes of one value
MAX_RENDER_SECONDS = 10.0  # CPU seconds of one rendering
BYTES_PER_CHECK = 1024  # bytes charged between checks of the clock
ELEMENT = 16  # bytes per element of a container; a copy of the container shares its elements
MAX_NESTED_ELEMENTS = 1 << 18  # elements of a value that is written out, nested ones included
PIECE = 64  # bytes per part of a text that is split


class RenderMeter:
    """Cost of one rendering so far."""

    def __init__(self) -> None:
        self._spent = 0
        self._next_check = BYTES_PER_CHECK
        self._deadline = time.thread_time() + MAX_RENDER_SECONDS

    def charge(self, cost: int) -> None:
        """Add a cost. Raise SecurityError if a limit on size or time is exceeded."""
        self._spent += cost
        if cost > MAX_VALUE_BYTES or self._spent > MAX_RENDER_BYTES:
            raise SecurityError("the template writes or builds too much")
        if self._spent >= self._next_check:
            self._next_check = self._spent + BYTES_PER_CHECK
            if time.thread_time() > self._deadline:
                raise SecurityError(f"the template takes more than {MAX_RENDER_SECONDS:g} seconds")


_METER: ContextVar[RenderMeter | None] = ContextVar("meter", default=None)


@contextmanager
def metered() -> Iterator[None]:
    """Count all charges within this context together."""
    token = _METER.set(RenderMeter())
    try:
        yield
    finally:
        _METER.reset(token)


def charge(cost: int) -> None:
    """Charge the current rendering. Outside `metered`, where Jinja folds constants, only the single cost is limited."""
    meter = _METER.get()
    if meter is not None:
        meter.charge(cost)
    elif cost > MAX_VALUE_BYTES:
        raise SecurityError("the template builds too much")


def size(value: object) -> int:
    """Return roughly the bytes that a value takes by itself, without its elements."""
    if isinstance(value, str | bytes):
        return len(value)
    return ELEMENT * len(value) if isinstance(value, list | tuple | dict | set | frozenset) else 1


def weight(value: object) -> int:
    """Return an upper bound of the value's length written out, nested elements included, capped at MAX_VALUE_BYTES + 1.

    A list that holds another list twice, which holds a third twice, and so on, takes little memory. Its text grows
    exponentially with the depth.
    """
    total, elements, left = 0, 0, [value]
    while left and total <= MAX_VALUE_BYTES:
        one = left.pop()
        elements += 1
        if elements > MAX_NESTED_ELEMENTS:
            return MAX_VALUE_BYTES + 1
        if isinstance(one, str | bytes):
            total += len(one)
            continue
        total += ELEMENT
        if isinstance(one, dict):
            left += one.keys()
            left += one.values()
        elif isinstance(one, list | tuple | set | frozenset):
            left += one
        elif isinstance(one, int):
            total += one.bit_length() // 3
    return min(total, MAX_VALUE_BYTES + 1)


def weights(values: Iterable[object]) -> int:
    """Return the sum of the values' weights."""
    return sum(map(weight, values))
