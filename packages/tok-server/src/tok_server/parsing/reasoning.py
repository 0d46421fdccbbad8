"""Separate reasoning in think blocks, as Qwen3 and similar models write it, from the content after it.

`<think>` begins the answer, or already ends the prompt; `</think>` ends the block. White space around reasoning, and
between the block and the content, is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING

from tok_server.parsing.pieces import Piece, ReasoningPiece, Text, joined

if TYPE_CHECKING:
    from tok_core.text import Tokenizer

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


class _Place(Enum):
    BEFORE = auto()  # only white space and part of the opening mark so far
    THINKING = auto()
    BETWEEN = auto()  # white space after the block
    SAYING = auto()


class ReasoningReader:
    """Splitter of an answer's text, which arrives in parts of any size, into reasoning and content.

    thinking  the prompt has opened the think block
    thought   the answer has a think block
    """

    def __init__(self, thinking: bool = False) -> None:
        self.thought = thinking
        self._opened = thinking
        self._begun = False  # reasoning text has been emitted
        self._place = _Place.BEFORE
        self._held = ""  # text that may be part of a mark, or white space at an end
        self._out: list[Piece] = []

    @property
    def saying(self) -> bool:
        """Return whether all further text is content."""
        return self._place in (_Place.BETWEEN, _Place.SAYING)

    def feed(self, text: str) -> list[Piece]:
        """Consume `text`; return the pieces that are certain now."""
        text = self._held + text
        self._held = ""
        while text and self._place is not _Place.SAYING:
            text = self._read(text)
        self._out.append(Text(text))
        return self._taken()

    def finish(self) -> list[Piece]:
        """Return the remaining pieces."""
        if self._place is _Place.BEFORE:
            self._out.append(ReasoningPiece(self._held.strip()) if self._opened else Text(self._held))
        elif self._place is _Place.THINKING:
            self._out.append(ReasoningPiece(self._held.rstrip()))
        self._held = ""
        return self._taken()

    def _read(self, text: str) -> str:
        """Consume the certain part of `text`. Return the rest of it if `_place` has changed, else an empty string."""
        match self._place:
            case _Place.BEFORE:
                return self._before(text)
            case _Place.THINKING:
                return self._thinking(text)
            case _Place.BETWEEN:
                return self._between(text)
            case _Place.SAYING:
                return text

    def _before(self, text: str) -> str:
        stripped = text.lstrip()
        if THINK_OPEN.startswith(stripped):
            if stripped == THINK_OPEN:
                return self._begin("")
            self._held = text
            return ""
        if stripped.startswith(THINK_OPEN):
            return self._begin(stripped[len(THINK_OPEN) :])
        if self._opened:
            return self._begin(stripped)
        self._place = _Place.SAYING
        return text

    def _begin(self, text: str) -> str:
        self._place = _Place.THINKING
        self.thought = True
        return text

    def _thinking(self, text: str) -> str:
        if not self._begun:
            text = text.lstrip()
        end = text.find(THINK_CLOSE)
        if end >= 0:
            self._think(text[:end].rstrip())
            self._place = _Place.BETWEEN
            return text[end + len(THINK_CLOSE) :]
        kept = text[: len(text) - _mark_at_end(text)].rstrip()
        self._think(kept)
        self._held = text[len(kept) :]
        return ""

    def _think(self, text: str) -> None:
        self._begun = self._begun or bool(text)
        self._out.append(ReasoningPiece(text))

    def _between(self, text: str) -> str:
        text = text.lstrip()
        if text:
            self._place = _Place.SAYING
        return text

    def _taken(self) -> list[Piece]:
        out, self._out = self._out, []
        return joined(out)


def _mark_at_end(text: str) -> int:
    """Return how many of the last characters may begin the closing mark."""
    return next(
        (size for size in range(min(len(THINK_CLOSE) - 1, len(text)), 0, -1) if THINK_CLOSE.startswith(text[-size:])), 0
    )


class ReasoningCounter:
    """Counter of a sample's tokens up to the end of its think block, marks included; 0 without a block."""

    def __init__(self, tokenizer: Tokenizer, thinking: bool) -> None:
        self._tokenizer = tokenizer
        self._reader = ReasoningReader(thinking)
        self._seen = 0

    @property
    def count(self) -> int:
        return self._seen if self._reader.thought else 0

    def feed(self, token_ids: Sequence[int]) -> None:
        """Count more tokens of the sample."""
        for piece in self._tokenizer.pieces_of(token_ids, True):
            if self._reader.saying:
                return
            # Latin-1 maps each byte to a character: marks are ASCII, and tokens may split characters.
            self._reader.feed(piece.decode("latin-1"))
            self._seen += 1
