"""Read prompts from any iterable, a few at a time and only when they are needed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Sequence
from itertools import islice
from typing import Generic, TypeVar

P = TypeVar("P")

_SECONDS = 0.005  # of reading, after which the prompts read so far are returned


class Source(Generic[P]):
    """Reader of `prompts`. Iterables other than sequences may block, and are therefore read on a thread.

    `total` is the number of prompts, if known. ValueError: `prompts` is a text, whose characters would be the prompts;
    TypeError: it is not iterable.
    """

    def __init__(self, prompts: Iterable[P] | AsyncIterable[P]) -> None:
        if isinstance(prompts, str | bytes):
            raise ValueError("prompts is one text; allowed: an iterable of prompts")
        self.total = len(prompts) if isinstance(prompts, Sequence) else None
        self._later: AsyncIterator[P] | None = None
        self._now: Iterator[P] | None = None
        if isinstance(prompts, AsyncIterable):
            self._later = aiter(prompts)
        else:
            self._now = iter(prompts)

    async def take(self, most: int) -> list[P]:
        """Return the next prompts: 1 to `most`, or none at the end. Raises the errors of the iterable."""
        if self._later is not None:
            return [prompt async for prompt in _first(self._later)]
        assert self._now is not None
        if self.total is not None:
            return list(islice(self._now, most))
        return await asyncio.to_thread(_read, self._now, most)


async def _first(prompts: AsyncIterator[P]) -> AsyncIterator[P]:
    try:
        yield await anext(prompts)
    except StopAsyncIteration:
        return


def _read(prompts: Iterator[P], most: int) -> list[P]:
    taken: list[P] = []
    until = time.monotonic() + _SECONDS
    for prompt in prompts:
        taken.append(prompt)
        if len(taken) == most or time.monotonic() > until:
            break
    return taken
