"""Sets of characters that grammar texts may contain, as spans of code points."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache, wraps
from typing import Final, TypeVar

FIRST: Final = 1  # xgrammar's rules cannot name the character 0
LAST: Final = 0x10FFFF
SURROGATES: Final = (0xD800, 0xDFFF)

Spans = tuple[tuple[int, int], ...]
"""Ranges (first, last) of code points, both inclusive; ascending and not adjacent."""


MAX_CACHED_SIZE: Final = 16  # spans or characters of a cached set: requests may have sets of any size
MAX_CACHED_SETS: Final = 1024

T = TypeVar("T", Spans, str)


class Unsupported(ValueError):
    """Error for a grammar that is invalid or cannot be expressed; the message says what is allowed, and where."""


class Unsatisfiable(Unsupported):
    """Error for a schema without a valid value that a grammar can write."""


def cached(function: Callable[[T], str]) -> Callable[[T], str]:
    """Return the function with a cache for the sets of MAX_CACHED_SIZE at most that it was called with last."""
    small = lru_cache(MAX_CACHED_SETS)(function)
    return wraps(function)(lambda of: small(of) if len(of) <= MAX_CACHED_SIZE else function(of))


def check_text(text: str) -> None:
    """Raise Unsupported for a text with the character U+0000, which no grammar can name."""
    if "\0" in text:
        raise Unsupported("texts without the character U+0000")


def one_of(text: str) -> Spans:
    """Return the set of the characters of `text`."""
    return union((ord(character), ord(character)) for character in text)


def union(spans: Iterable[tuple[int, int]]) -> Spans:
    """Return the characters of all spans, without surrogates and U+0000, which texts cannot contain."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    low, high = SURROGATES
    cut = [part for a, b in merged for part in ((max(a, FIRST), min(b, low - 1)), (max(a, high + 1), b))]
    return tuple((a, b) for a, b in cut if a <= b)


def complement(spans: Spans, within: Spans = ((FIRST, LAST),)) -> Spans:
    """Return the characters of `within` that are not in `spans`."""
    found = []
    for low, high in within:
        start = low
        for first, last in spans:
            if first > high or last < low:
                continue
            found.append((start, first - 1))
            start = last + 1
        found.append((start, high))
    return union((a, b) for a, b in found if a <= b)


def common(one: Spans, other: Spans) -> Spans:
    """Return the characters in both sets."""
    return complement(complement(other), one)
