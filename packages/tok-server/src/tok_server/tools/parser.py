"""CallParser: an answer's text, in pieces of any size, split into content and tool calls.

However the text is cut, the pieces joined are the same. What looks like a call but is none comes out as content: no
text is lost, but for the marks around calls and for white space beside them. Of a call that has been told already, what
spoils it is content, too; its arguments stay as they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container

from tok_server.tools.call_object import CallObject
from tok_server.tools.pieces import Piece, Text, joined


class CallParser(ABC):
    """What all formats have in common; a format says where a call may begin. `tools`: names of what may be called."""

    def __init__(self, tools: Container[str]) -> None:
        self._tools = tools
        self._call: CallObject | None = None
        self._held: list[str] = []  # since the mark ahead of a call: content, if it is none
        self._space = ""  # at the end of the content so far: dropped, if a call follows
        self._calls = 0
        self._out: list[Piece] = []

    def feed(self, text: str) -> list[Piece]:
        """What has become certain now that `text` follows."""
        at = 0
        while at < len(text):
            at = self._outside(text, at) if self._call is None else self._inside(self._call, text, at)
        return self._taken()

    def finish(self) -> list[Piece]:
        """The rest: what might have become a call is content."""
        self._give_up()
        if not self._calls:
            self._out.append(Text(self._space))
        return self._taken()

    @abstractmethod
    def _outside(self, text: str, at: int) -> int:
        """Reads `text` from `at` on where no call is open. Returns where to go on."""

    @abstractmethod
    def _ended(self) -> None:
        """A call has ended."""

    def _begin(self) -> None:
        """A call may begin here."""
        self._call = CallObject(self._tools)

    def _inside(self, call: CallObject, text: str, at: int) -> int:
        end = call.run(text, at)
        if end > at:
            self._out += call.taken()
            return end
        character = text[at]
        if not call.feed(character):
            self._give_up()
            return at  # it is read again, as content
        if call.begun:
            if self._held or self._space:
                self._held, self._space = [], ""
            self._out += call.taken()
        else:
            self._held.append(character)
        if call.ended:
            self._call = None
            self._calls += 1
            self._ended()
        return at + 1

    def _give_up(self) -> None:
        """What is held is content."""
        if self._call is not None and self._call.begun:
            self._calls += 1
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
