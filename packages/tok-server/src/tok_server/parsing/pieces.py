"""Define the pieces into which a chat's answer is split once its markup has been parsed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, slots=True)
class ContentPiece:
    """A stretch of content."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """A stretch of reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The beginning of a call of the tool `name`, to which the following `ArgumentsPiece` belong."""

    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsPiece:
    """A further stretch of the last call's arguments, as JSON text."""

    text: str


Piece = ContentPiece | ReasoningPiece | CallBegin | ArgumentsPiece


def merge_pieces(pieces: Iterable[Piece]) -> list[Piece]:
    """Merge neighbouring pieces of one kind, except `CallBegin`, and drop empty ones."""
    found: list[Piece] = []
    for kind, group in groupby(pieces, type):
        if kind is CallBegin:
            found.extend(group)
        elif text := "".join(piece.text for piece in group if not isinstance(piece, CallBegin)):
            found.append(kind(text))
    return found
