"""Pieces: what a chat's answer is made of once its markup has been read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, slots=True)
class Text:
    """Content."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of the tool `name` begins; the arguments that follow are its own."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the JSON text of the last call's arguments."""

    text: str


Piece = Text | Thought | CallBegin | Arguments


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The same with neighbours of one kind put together, and without empty ones."""
    found: list[Piece] = []
    for kind, group in groupby(pieces, type):
        if kind is CallBegin:
            found.extend(group)
        elif text := "".join(piece.text for piece in group if not isinstance(piece, CallBegin)):
            found.append(kind(text))
    return found
