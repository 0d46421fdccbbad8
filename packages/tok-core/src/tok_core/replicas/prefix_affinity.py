"""Prefix affinity: estimate how much of a prompt's prefix each replica has cached, from what was sent to it.

A prompt is looked up by its beginnings of 1, 2, 3, 4, 6, 8, 12, … pages: few, and never much shorter than what two
prompts have in common.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tok_core.messages import Int32

MAX_PREFIXES = 1 << 16  # beginnings that are remembered, those used last
MAX_PREFIX_TOKENS = 1 << 30


class PromptPrefix(NamedTuple):
    """The first `length` tokens of a prompt."""

    key: int
    length: int


class PrefixAffinity:
    """The replicas that were sent each beginning, as bits. For one thread at a time, but for `beginnings`."""

    def __init__(self, page_size: int, most: int = MAX_PREFIXES) -> None:
        self._lengths = list(_lengths(page_size))
        self._most = most
        self._replicas: OrderedDict[int, int] = OrderedDict()  # by key; bit i stands for replica i

    def __len__(self) -> int:
        return len(self._replicas)

    def beginnings(self, tokens: Int32, salt: bytes = b"") -> list[PromptPrefix]:
        """Return the keys of a prompt, the shortest first. Prompts of different salts have none in common."""
        found, start, key = [], 0, hash(salt)
        for length in self._lengths:
            if length > len(tokens):
                break
            key = hash((key, tokens[start:length].tobytes()))  # of all tokens so far
            found.append(PromptPrefix(key, length))
            start = length
        return found

    def find(self, beginnings: Sequence[PromptPrefix], among: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        """Lengths, the greatest first, and which of the replicas `among` were sent as much."""
        for key, length in reversed(beginnings):
            bits = self._replicas.get(key, 0)
            having = [replica for replica in among if bits >> replica & 1]
            if having:
                yield length, having

    def add(self, beginnings: Sequence[PromptPrefix], replica: int) -> None:
        """The replica is sent a prompt."""
        for key, _ in beginnings:
            self._replicas[key] = self._replicas.pop(key, 0) | 1 << replica
        while len(self._replicas) > self._most:
            self._replicas.popitem(last=False)

    def forget(self, replica: int) -> None:
        """The replica has nothing of what it was sent any more."""
        kept = ((key, bits & ~(1 << replica)) for key, bits in self._replicas.items())
        self._replicas = OrderedDict((key, bits) for key, bits in kept if bits)


def _lengths(page_size: int) -> Iterator[int]:
    length = page_size
    while length <= MAX_PREFIX_TOKENS:
        yield length
        if length > page_size and 3 * length // 2 <= MAX_PREFIX_TOKENS:
            yield 3 * length // 2
        length *= 2
