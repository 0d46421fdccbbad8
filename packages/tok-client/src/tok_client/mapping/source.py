"""Read prompts from any iterable, a few at a time and only when they are needed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Sequence
from itertools import islice
from typing import Generic, TypeVar

P = TypeVar("P")

_READ_SECONDS = 0.005  # a read that takes longer returns the prompts read so far


class Source(Generic[P]):
    """Reader of `prompts`. Iterables other than sequences may block, and are therefore read on a thread.

    `total` is the number of prompts, if known. ValueError: `prompts` is a text, whose characters would be the prompts;
    TypeError: it is not iterable.
    """

    def __init__(self, prompts: Iterable[P] | AsyncIterable[P]) -> None:
        if isinstance(prompts, str | bytes):
            raise ValueError("prompts is one text; allowed: an iterable of prompts")
        self.total = len(prompts) if isinstance(prompts, Sequence) else None
        self._async_iterator: AsyncIterator[P] | None = None
        self._iterator: Iterator[P] | None = None
        if isinstance(prompts, AsyncIterable):
            self._async_iterator = aiter(prompts)
        else:
            self._iterator = iter(prompts)

    async def take(self, max_prompts: int) -> list[P]:
        """Return the next prompts: 1 to `max_prompts`, or none at the end. Raises the errors of the iterable."""
        if self._async_iterator is not None:
            try:
                return [await anext(self._async_iterator)]
            except StopAsyncIteration:
                return []
        assert self._iterator is not None
        if self.total is not None:
            return list(islice(self._iterator, max_prompts))
        return await asyncio.to_thread(_read, self._iterator, max_prompts)


def _read(prompts: Iterator[P], max_prompts: int) -> list[P]:
    prompts_read: list[P] = []
    deadline = time.monotonic() + _READ_SECONDS
    for prompt in prompts:
        prompts_read.append(prompt)
        if len(prompts_read) == max_prompts or time.monotonic() > deadline:
            break
    return prompts_read
