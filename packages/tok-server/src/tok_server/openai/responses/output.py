"""Assemble the items of one response while the model generates them, and the events that report them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import assert_never

from tok_client.types import ChatTokenLogprob, ItemStatus, OutputItem, ResponseEvent
from tok_server.openai.responses.open_items import Logprobs, OpenFunctionCall, OpenItem, OpenMessage, OpenReasoning
from tok_server.parsing import ArgumentsPiece, CallBegin, ContentPiece, Piece, ReasoningPiece


class ResponseOutput:
    """The output of one response. `items`: items that have ended. `sequence_numbers`: sequence numbers of events."""

    def __init__(self, sequence_numbers: Iterator[int]) -> None:
        self.items: list[OutputItem] = []
        self._sequence_numbers = sequence_numbers
        self._open: OpenItem | None = None
        self._pending_logprobs: list[ChatTokenLogprob] = []

    def add(self, pieces: Iterable[Piece], logprobs: Logprobs) -> list[ResponseEvent]:
        """Add pieces and their tokens' log-probabilities, of which only those of text are kept. Return the events."""
        self._pending_logprobs += logprobs
        events: list[ResponseEvent] = []
        for piece in pieces:
            item = self._item_for(piece)
            if item is not self._open:
                events += self._close("completed")
                self._open = item
                events += item.start_events()
            if not isinstance(piece, CallBegin):
                events.append(item.append(piece.text, _last_tokens(self._pending_logprobs, piece.text)))
            self._pending_logprobs = []
        return events

    def end(self, *, complete: bool) -> list[ResponseEvent]:
        """End the last item; return the events. `complete`: the sample was not cut off by its length."""
        events: list[ResponseEvent] = []
        if self._open is None:  # clients expect a message
            self._open = OpenMessage(0, self._sequence_numbers)
            events += self._open.start_events()
        return events + self._close("completed" if complete else "incomplete")

    def _item_for(self, piece: Piece) -> OpenItem:
        """Return the item that the piece belongs to: the open one, or a new one."""
        index = len(self.items) + (self._open is not None)
        match piece:
            case CallBegin(name):
                return OpenFunctionCall(index, self._sequence_numbers, name)
            case ContentPiece():
                return self._open if isinstance(self._open, OpenMessage) else OpenMessage(index, self._sequence_numbers)
            case ReasoningPiece():
                return (
                    self._open
                    if isinstance(self._open, OpenReasoning)
                    else OpenReasoning(index, self._sequence_numbers)
                )
            case ArgumentsPiece():
                assert self._open is not None, "arguments follow the beginning of their call"
                return self._open
        assert_never(piece)

    def _close(self, status: ItemStatus) -> list[ResponseEvent]:
        if self._open is None:
            return []
        events = self._open.end_events(status)
        self.items.append(self._open.item(status))
        self._open = None
        return events


def _last_tokens(tokens: Logprobs, text: str) -> Logprobs:
    """Return the last tokens that make up `text`; those before them are marks, or white space around marks."""
    remaining_bytes, first = len(text.encode()), len(tokens)
    while remaining_bytes > 0 and first:
        first -= 1
        remaining_bytes -= len(tokens[first].bytes or ())
    return tokens[first:]
