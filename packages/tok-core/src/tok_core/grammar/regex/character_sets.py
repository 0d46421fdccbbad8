"""Sets of characters that texts may have, as spans of code points."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

FIRST: Final = 1  # xgrammar's rules cannot name the character 0
LAST: Final = 0x10FFFF
SURROGATES: Final = (0xD800, 0xDFFF)

Spans = tuple[tuple[int, int], ...]
"""Code points from first to last, ascending, not touching."""


class Unsupported(ValueError):
    """What was asked for is no grammar, or cannot be said by one; the message tells what is allowed, and where."""


class Unsatisfiable(Unsupported):
    """A schema under which a grammar can write nothing."""


def check_text(text: str) -> None:
    """Raises Unsupported for a text that no grammar can name."""
    if "\0" in text:
        raise Unsupported("texts without the character U+0000")


def one_of(text: str) -> Spans:
    """The characters of a text."""
    return union((ord(character), ord(character)) for character in text)


def union(spans: Iterable[tuple[int, int]]) -> Spans:
    """The characters of all spans that texts may have: no surrogates, and not the character 0."""
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
    """The characters of `within` that are not in the set."""
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
    """The characters in both sets."""
    return complement(complement(other), one)
