"""Split an answer's text, which arrives in parts of any size, into content and tool calls.

However the text is cut, the joined pieces are the same. A call is emitted once all of it has been read, if its
arguments are a JSON object. All else is content, unchanged, including broken and incomplete calls. Only the marks
around calls and the white space beside them are dropped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container

from tok_server.parsing.call_object import CallObject
from tok_server.parsing.pieces import ArgumentsPiece, CallBegin, ContentPiece, Piece, merge_pieces


class CallParser(ABC):
    """Base of the parsers; a subclass finds where a call may begin. `tools`: names of the tools that may be called."""

    def __init__(self, tools: Container[str]) -> None:
        self._tools = tools
        self._call: CallObject | None = None
        self._held_text: list[str] = []  # text since the mark before a call: content if it is no call
        self._trailing_space = ""  # white space at the end of the content so far: dropped if a call follows
        self._calls = 0
        self._pieces: list[Piece] = []

    def feed(self, text: str) -> list[Piece]:
        """Consume `text`; return the pieces that are certain now."""
        at = 0
        while at < len(text):
            at = self._read_content(text, at) if self._call is None else self._read_call(self._call, text, at)
        return self._pop_pieces()

    def finish(self) -> list[Piece]:
        """Return the remaining pieces: an incomplete call is content."""
        self._abandon_call()
        if not self._calls:
            self._pieces.append(ContentPiece(self._trailing_space))
        return self._pop_pieces()

    @abstractmethod
    def _read_content(self, text: str, at: int) -> int:
        """Read `text` from `at` on while no call is open. Return the index at which to continue."""

    @abstractmethod
    def _call_ended(self) -> None:
        """Prepare for the text after a complete call."""

    def _begin_call(self) -> None:
        """Start to parse a possible call."""
        self._call = CallObject(self._tools)

    def _read_call(self, call: CallObject, text: str, at: int) -> int:
        end = call.skip_plain_text(text, at)
        if end > at:
            self._held_text.append(text[at:end])
            return end
        if not call.feed(text[at]):
            self._abandon_call()
            return at  # the character is read again, as content
        self._held_text.append(text[at])
        if call.ended:
            self._call, self._held_text, self._trailing_space = None, [], ""
            self._calls += 1
            self._pieces += [CallBegin(str(call.name)), ArgumentsPiece(str(call.arguments))]
            self._call_ended()
        return at + 1

    def _abandon_call(self) -> None:
        """Turn the held text into content."""
        self._call = None
        held, self._held_text = "".join(self._held_text), []
        self._emit_content(held)

    def _emit_content(self, text: str) -> None:
        text = self._trailing_space + text
        kept = text.rstrip()
        if kept:
            self._pieces.append(ContentPiece(kept))
        self._trailing_space = text[len(kept) :]

    def _pop_pieces(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return merge_pieces(pieces)
