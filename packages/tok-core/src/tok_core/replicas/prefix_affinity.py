"""Estimate how much of a prompt's prefix each replica has cached, from the prompts sent to it.

A prompt is looked up by its prefixes of 1, 2, 3, 4, 6, 8, 12, … pages. These are few, and their longest common one has
at least two thirds of the pages that two prompts share.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tok_core.messages import Int32

MAX_PREFIXES = 1 << 16  # prefixes remembered; the least recently sent ones are evicted
MAX_PREFIX_TOKENS = 1 << 30  # tokens of the longest prefix looked up


class PromptPrefix(NamedTuple):
    """The first `length` tokens of a prompt, by their hash `key`."""

    key: int
    length: int


class PrefixAffinity:
    """Map from prefixes to the replicas they were sent to, as bits. Not thread-safe, except for `prefixes`."""

    def __init__(self, page_size: int, max_prefixes: int = MAX_PREFIXES) -> None:
        self._lengths = list(_lengths(page_size))
        self._max_prefixes = max_prefixes
        self._replicas: OrderedDict[int, int] = OrderedDict()  # by key; bit i stands for replica i

    def __len__(self) -> int:
        return len(self._replicas)

    def prefixes(self, tokens: Int32, salt: bytes = b"") -> list[PromptPrefix]:
        """Return the prefixes of a prompt, shortest first. Prompts with different salts share none."""
        prefixes, start, key = [], 0, hash(salt)
        for length in self._lengths:
            if length > len(tokens):
                break
            key = hash((key, tokens[start:length].tobytes()))  # chained, so it depends on all tokens before `length`
            prefixes.append(PromptPrefix(key, length))
            start = length
        return prefixes

    def find(self, prefixes: Sequence[PromptPrefix], among: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        """Yield the length of each known prefix, longest first, and which of the replicas `among` received it."""
        for key, length in reversed(prefixes):
            bits = self._replicas.get(key, 0)
            holders = [replica for replica in among if bits >> replica & 1]
            if holders:
                yield length, holders

    def add(self, prefixes: Sequence[PromptPrefix], replica: int) -> None:
        """Record that a prompt is sent to the replica."""
        for key, _ in prefixes:
            self._replicas[key] = self._replicas.pop(key, 0) | 1 << replica
        while len(self._replicas) > self._max_prefixes:
            self._replicas.popitem(last=False)

    def remove_replica(self, replica: int) -> None:
        """Remove the replica from all prefixes, since it has lost its cache."""
        kept = ((key, bits & ~(1 << replica)) for key, bits in self._replicas.items())
        self._replicas = OrderedDict((key, bits) for key, bits in kept if bits)


def _lengths(page_size: int) -> Iterator[int]:
    length = page_size
    while length <= MAX_PREFIX_TOKENS:
        yield length
        if length > page_size and 3 * length // 2 <= MAX_PREFIX_TOKENS:
            yield 3 * length // 2
        length *= 2
