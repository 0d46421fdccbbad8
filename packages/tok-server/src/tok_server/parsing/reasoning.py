"""Separate reasoning in think blocks, as Qwen3 and similar models write it, from the content after it.

`<think>` begins the answer, or already ends the prompt; `</think>` ends the block. White space around reasoning, and
between the block and the content, is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING

from tok_server.parsing.pieces import ContentPiece, Piece, ReasoningPiece, merge_pieces

if TYPE_CHECKING:
    from tok_core.text import Tokenizer

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


class _State(Enum):
    BEFORE = auto()  # only white space and part of the opening mark so far
    THINKING = auto()
    BETWEEN = auto()  # white space after the block
    CONTENT = auto()


class ReasoningReader:
    """Splitter of an answer's text, which arrives in parts of any size, into reasoning and content.

    thinking         the prompt has opened the think block
    has_think_block  the answer has a think block
    """

    def __init__(self, thinking: bool) -> None:
        self.has_think_block = thinking
        self._opened = thinking
        self._emitted = False  # reasoning text has been emitted
        self._state = _State.BEFORE
        self._held_text = ""  # text that may be part of a mark, or white space at an end
        self._pieces: list[Piece] = []

    @property
    def in_content(self) -> bool:
        """Return whether all further text is content."""
        return self._state in (_State.BETWEEN, _State.CONTENT)

    def feed(self, text: str) -> list[Piece]:
        """Consume `text`; return the pieces that are certain now."""
        text = self._held_text + text
        self._held_text = ""
        while text and self._state is not _State.CONTENT:
            text = self._read(text)
        self._pieces.append(ContentPiece(text))
        return self._pop_pieces()

    def finish(self) -> list[Piece]:
        """Return the remaining pieces."""
        if self._state is _State.BEFORE:
            self._pieces.append(
                ReasoningPiece(self._held_text.strip()) if self._opened else ContentPiece(self._held_text)
            )
        elif self._state is _State.THINKING:
            self._pieces.append(ReasoningPiece(self._held_text.rstrip()))
        self._held_text = ""
        return self._pop_pieces()

    def _read(self, text: str) -> str:
        """Consume the certain part of `text`. Return the rest of it if `_state` has changed, else an empty string."""
        match self._state:
            case _State.BEFORE:
                return self._before(text)
            case _State.THINKING:
                return self._thinking(text)
            case _State.BETWEEN:
                return self._between(text)
            case _State.CONTENT:
                return text

    def _before(self, text: str) -> str:
        stripped = text.lstrip()
        if THINK_OPEN.startswith(stripped):
            if stripped == THINK_OPEN:
                return self._begin("")
            self._held_text = text
            return ""
        if stripped.startswith(THINK_OPEN):
            return self._begin(stripped[len(THINK_OPEN) :])
        if self._opened:
            return self._begin(stripped)
        self._state = _State.CONTENT
        return text

    def _begin(self, text: str) -> str:
        self._state = _State.THINKING
        self.has_think_block = True
        return text

    def _thinking(self, text: str) -> str:
        if not self._emitted:
            text = text.lstrip()
        end = text.find(THINK_CLOSE)
        if end >= 0:
            self._emit_reasoning(text[:end].rstrip())
            self._state = _State.BETWEEN
            return text[end + len(THINK_CLOSE) :]
        kept = text[: len(text) - _partial_mark_length(text)].rstrip()
        self._emit_reasoning(kept)
        self._held_text = text[len(kept) :]
        return ""

    def _emit_reasoning(self, text: str) -> None:
        self._emitted = self._emitted or bool(text)
        self._pieces.append(ReasoningPiece(text))

    def _between(self, text: str) -> str:
        text = text.lstrip()
        if text:
            self._state = _State.CONTENT
        return text

    def _pop_pieces(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return merge_pieces(pieces)


def _partial_mark_length(text: str) -> int:
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
        return self._seen if self._reader.has_think_block else 0

    def feed(self, token_ids: Sequence[int]) -> None:
        """Count more tokens of the sample."""
        for piece in self._tokenizer.pieces_of(token_ids, True):
            if self._reader.in_content:
                return
            # Latin-1 maps each byte to a character: marks are ASCII, and tokens may split characters.
            self._reader.feed(piece.decode("latin-1"))
            self._seen += 1
