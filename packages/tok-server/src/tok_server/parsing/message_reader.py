"""Split a chat sample's text, as it arrives, into reasoning, content and tool calls; build messages of them."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import assert_never

from tok_client.types import (
    UNSET,
    ChatMessage,
    FunctionCall,
    FunctionCallDelta,
    FunctionToolCall,
    ToolCallDelta,
)
from tok_client.types import Delta as MessageDelta
from tok_server.parsing.formats import call_parser
from tok_server.parsing.markup import Markup
from tok_server.parsing.pieces import Arguments, CallBegin, Piece, ReasoningPiece, Text
from tok_server.parsing.reasoning import ReasoningReader

_SOURCE = random.Random()


class MessageReader:
    """Reader of one sample's text. However the text is cut, the joined pieces are the same."""

    def __init__(self, markup: Markup) -> None:
        self._thoughts = ReasoningReader(markup.thinking) if markup.reasoning else None
        self._parser = call_parser(markup.calls, markup.tools) if markup.calls else None
        self._most = None if markup.parallel else 1
        self.calls = 0

    def feed(self, text: str) -> list[Piece]:
        """Consume `text`; return the pieces that are certain now."""
        return self._told(self._split(self._thoughts.feed(text) if self._thoughts else [Text(text)]))

    def finish(self) -> list[Piece]:
        """Return the remaining pieces."""
        pieces = self._split(self._thoughts.finish()) if self._thoughts else []
        return self._told(pieces + (self._parser.finish() if self._parser else []))

    def _split(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Return the pieces with their content split into content and calls."""
        found: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, Text) and self._parser is not None:
                found += self._parser.feed(piece.text)
            else:
                found.append(piece)
        return found

    def _told(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Return the pieces without calls beyond the first, unless parallel calls are allowed."""
        found: list[Piece] = []
        for piece in pieces:
            self.calls += isinstance(piece, CallBegin)
            if self._most is None or self.calls <= self._most or not isinstance(piece, CallBegin | Arguments):
                found.append(piece)
        return found


@dataclass(slots=True)
class _Call:
    name: str
    arguments: list[str] = field(default_factory=list)


def message(pieces: Iterable[Piece]) -> ChatMessage:
    """Build the whole message from a sample's pieces."""
    content: list[str] = []
    thoughts: list[str] = []
    calls: list[_Call] = []
    for piece in pieces:
        match piece:
            case Text(text):
                content.append(text)
            case ReasoningPiece(text):
                thoughts.append(text)
            case CallBegin(name):
                calls.append(_Call(name))
            case Arguments(text):
                calls[-1].arguments.append(text)
            case _:
                assert_never(piece)
    return ChatMessage(
        content="".join(content) if content or not (thoughts or calls) else None,
        reasoning_content="".join(thoughts) if thoughts else UNSET,
        tool_calls=[_whole_call(call) for call in calls] if calls else UNSET,
    )


def _whole_call(call: _Call) -> FunctionToolCall:
    function = FunctionCall(name=call.name, arguments="".join(call.arguments))
    return FunctionToolCall(id=_call_id(), function=function)


def message_delta(piece: Piece, calls: int) -> MessageDelta:
    """Return what a streamed message gains by `piece`. `calls`: number of its call, from 1, if it belongs to one."""
    match piece:
        case Text(text):
            return MessageDelta(content=text)
        case ReasoningPiece(text):
            return MessageDelta(reasoning_content=text)
        case CallBegin(name):
            function = FunctionCallDelta(name=name, arguments="")
            begun = ToolCallDelta(index=calls - 1, id=_call_id(), type="function", function=function)
            return MessageDelta(tool_calls=[begun])
        case Arguments(text):
            return MessageDelta(tool_calls=[ToolCallDelta(index=calls - 1, function=FunctionCallDelta(arguments=text))])
    assert_never(piece)


def _call_id() -> str:
    return f"call_{_SOURCE.getrandbits(96):024x}"
