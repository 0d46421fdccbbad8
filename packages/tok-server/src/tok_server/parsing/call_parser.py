"""Split an answer's text, which arrives in parts of any size, into content and tool calls.

However the text is cut, the joined pieces are the same. A call is emitted once all of it has been read, if its
arguments are a JSON object. All else is content, unchanged, including broken and incomplete calls. Only the marks
around calls and the white space beside them are dropped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container

from tok_server.parsing.call_object import CallObject
from tok_server.parsing.pieces import Arguments, CallBegin, Piece, Text, joined


class CallParser(ABC):
    """Base of the parsers; a subclass finds where a call may begin. `tools`: names of the tools that may be called."""

    def __init__(self, tools: Container[str]) -> None:
        self._tools = tools
        self._call: CallObject | None = None
        self._held: list[str] = []  # text since the mark before a call: content if it is no call
        self._space = ""  # white space at the end of the content so far: dropped if a call follows
        self._calls = 0
        self._out: list[Piece] = []

    def feed(self, text: str) -> list[Piece]:
        """Consume `text`; return the pieces that are certain now."""
        at = 0
        while at < len(text):
            at = self._outside(text, at) if self._call is None else self._inside(self._call, text, at)
        return self._taken()

    def finish(self) -> list[Piece]:
        """Return the remaining pieces: an incomplete call is content."""
        self._give_up()
        if not self._calls:
            self._out.append(Text(self._space))
        return self._taken()

    @abstractmethod
    def _outside(self, text: str, at: int) -> int:
        """Read `text` from `at` on while no call is open. Return the index at which to continue."""

    @abstractmethod
    def _ended(self) -> None:
        """Prepare for the text after a complete call."""

    def _begin(self) -> None:
        """Start to parse a possible call."""
        self._call = CallObject(self._tools)

    def _inside(self, call: CallObject, text: str, at: int) -> int:
        end = call.run(text, at)
        if end > at:
            self._held.append(text[at:end])
            return end
        if not call.feed(text[at]):
            self._give_up()
            return at  # the character is read again, as content
        self._held.append(text[at])
        if call.ended:
            self._call, self._held, self._space = None, [], ""
            self._calls += 1
            self._out += [CallBegin(str(call.name)), Arguments(str(call.arguments))]
            self._ended()
        return at + 1

    def _give_up(self) -> None:
        """Turn the held text into content."""
        self._call = None
        held, self._held = "".join(self._held), []
        self._content(held)

    def _content(self, text: str) -> None:
        text = self._space + text
        kept = text.rstrip()
        if kept:
            self._out.append(Text(kept))
        self._space = text[len(kept) :]

    def _taken(self) -> list[Piece]:
        out, self._out = self._out, []
        return joined(out)
