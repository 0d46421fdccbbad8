"""Meter: what one rendering of a template has cost so far, in bytes or so, and what single values weigh."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from jinja2.exceptions import SecurityError

MAX_RENDER_BYTES = 1 << 28  # of a rendering
MAX_VALUE_BYTES = 1 << 26  # of one value
MAX_RENDER_SECONDS = 10.0  # of the processor
LOOK = 1024  # between looks at the clock
ELEMENT = 16  # of a container, in a copy of which it stays itself
MAX_NESTED_ELEMENTS = 1 << 18  # within elements, of what is written out
PIECE = 64  # a text cut off another


class RenderMeter:
    """What one rendering has cost so far."""

    def __init__(self) -> None:
        self._spent = 0
        self._next_look = LOOK
        self._deadline = time.thread_time() + MAX_RENDER_SECONDS

    def charge(self, cost: int) -> None:
        """Raises SecurityError where it is too much, or has taken too long."""
        self._spent += cost
        if cost > MAX_VALUE_BYTES or self._spent > MAX_RENDER_BYTES:
            raise SecurityError("the template writes or builds too much")
        if self._spent >= self._next_look:
            self._next_look = self._spent + LOOK
            if time.thread_time() > self._deadline:
                raise SecurityError(f"the template takes more than {MAX_RENDER_SECONDS:g} seconds")


_METER: ContextVar[RenderMeter | None] = ContextVar("meter", default=None)


@contextmanager
def metered() -> Iterator[None]:
    """What is charged within this counts together."""
    token = _METER.set(RenderMeter())
    try:
        yield
    finally:
        _METER.reset(token)


def charge(cost: int) -> None:
    """Counts it. Outside of `metered`, where constants are joined once and for all, only its size matters."""
    meter = _METER.get()
    if meter is not None:
        meter.charge(cost)
    elif cost > MAX_VALUE_BYTES:
        raise SecurityError("the template builds too much")


def size(value: object) -> int:
    """What a value takes by itself, its elements left out."""
    if isinstance(value, str | bytes):
        return len(value)
    return ELEMENT * len(value) if isinstance(value, list | tuple | dict | set | frozenset) else 1


def weight(value: object) -> int:
    """Return an upper bound of the value's length written out, nested elements included, capped at MAX_VALUE_BYTES + 1.

    A list that holds another twice, and that a third twice, takes little memory and has no end when it is written.
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
    """Of all together."""
    return sum(map(weight, values))
