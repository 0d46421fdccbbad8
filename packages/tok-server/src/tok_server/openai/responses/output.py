"""Assemble the items of one response while the model generates them, and the events that report them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import assert_never

from tok_client.types import ChatTokenLogprob, ItemStatus, OutputItem, ResponseEvent
from tok_server.openai.responses.open_items import Logprobs, OpenFunctionCall, OpenItem, OpenMessage, OpenReasoning
from tok_server.parsing import Arguments, CallBegin, Piece, ReasoningPiece, Text


class ResponseOutput:
    """The output of one response. `items`: items that have ended. `numbers`: sequence numbers of events."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self.items: list[OutputItem] = []
        self._numbers = numbers
        self._open: OpenItem | None = None
        self._untold: list[ChatTokenLogprob] = []

    def take(self, pieces: Iterable[Piece], logprobs: Logprobs) -> list[ResponseEvent]:
        """Add pieces and their tokens' log-probabilities, of which only those of text are kept. Return the events."""
        self._untold += logprobs
        events: list[ResponseEvent] = []
        for piece in pieces:
            opened = self._opened(piece)
            if opened is not self._open:
                events += self._close("completed")
                self._open = opened
                events += opened.begun()
            if not isinstance(piece, CallBegin):
                events.append(opened.gained(piece.text, _last(self._untold, piece.text)))
            self._untold = []
        return events

    def end(self, *, whole: bool) -> list[ResponseEvent]:
        """End the last item; return the events. `whole`: the sample was not cut off by its length."""
        events: list[ResponseEvent] = []
        if self._open is None:  # clients expect a message
            self._open = OpenMessage(0, self._numbers)
            events += self._open.begun()
        return events + self._close("completed" if whole else "incomplete")

    def _opened(self, piece: Piece) -> OpenItem:
        """Return the item that the piece belongs to: the open one, or a new one."""
        index = len(self.items) + (self._open is not None)
        match piece:
            case CallBegin(name):
                return OpenFunctionCall(index, self._numbers, name)
            case Text():
                return self._open if isinstance(self._open, OpenMessage) else OpenMessage(index, self._numbers)
            case ReasoningPiece():
                return self._open if isinstance(self._open, OpenReasoning) else OpenReasoning(index, self._numbers)
            case Arguments():
                assert self._open is not None, "arguments follow the beginning of their call"
                return self._open
        assert_never(piece)

    def _close(self, status: ItemStatus) -> list[ResponseEvent]:
        if self._open is None:
            return []
        events = self._open.ended(status)
        self.items.append(self._open.item(status))
        self._open = None
        return events


def _last(tokens: Logprobs, text: str) -> Logprobs:
    """Return the last tokens that make up `text`; those before them are marks, or white space around marks."""
    left, first = len(text.encode()), len(tokens)
    while left > 0 and first:
        first -= 1
        left -= len(tokens[first].bytes or ())
    return tokens[first:]
