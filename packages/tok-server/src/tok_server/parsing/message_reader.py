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
from tok_server.parsing.pieces import ArgumentsPiece, CallBegin, ContentPiece, Piece, ReasoningPiece
from tok_server.parsing.reasoning import ReasoningReader

_RANDOM = random.Random()


class MessageReader:
    """Reader of one sample's text. However the text is cut, the joined pieces are the same."""

    def __init__(self, markup: Markup) -> None:
        self._reasoning_reader = ReasoningReader(markup.thinking) if markup.reasoning else None
        self._parser = call_parser(markup.calls, markup.tools) if markup.calls else None
        self._max_calls = None if markup.parallel else 1
        self.calls = 0

    def feed(self, text: str) -> list[Piece]:
        """Consume `text`; return the pieces that are certain now."""
        return self._drop_extra_calls(
            self._split(self._reasoning_reader.feed(text) if self._reasoning_reader else [ContentPiece(text)])
        )

    def finish(self) -> list[Piece]:
        """Return the remaining pieces."""
        pieces = self._split(self._reasoning_reader.finish()) if self._reasoning_reader else []
        return self._drop_extra_calls(pieces + (self._parser.finish() if self._parser else []))

    def _split(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Return the pieces with their content split into content and calls."""
        result: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, ContentPiece) and self._parser is not None:
                result += self._parser.feed(piece.text)
            else:
                result.append(piece)
        return result

    def _drop_extra_calls(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Return the pieces without calls beyond the first, unless parallel calls are allowed."""
        result: list[Piece] = []
        for piece in pieces:
            self.calls += isinstance(piece, CallBegin)
            if (
                self._max_calls is None
                or self.calls <= self._max_calls
                or not isinstance(piece, CallBegin | ArgumentsPiece)
            ):
                result.append(piece)
        return result


@dataclass(slots=True)
class _Call:
    name: str
    arguments: list[str] = field(default_factory=list)


def build_message(pieces: Iterable[Piece]) -> ChatMessage:
    """Build the whole message from a sample's pieces."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[_Call] = []
    for piece in pieces:
        match piece:
            case ContentPiece(text):
                content.append(text)
            case ReasoningPiece(text):
                reasoning.append(text)
            case CallBegin(name):
                calls.append(_Call(name))
            case ArgumentsPiece(text):
                calls[-1].arguments.append(text)
            case _:
                assert_never(piece)
    return ChatMessage(
        content="".join(content) if content or not (reasoning or calls) else None,
        reasoning_content="".join(reasoning) if reasoning else UNSET,
        tool_calls=[_whole_call(call) for call in calls] if calls else UNSET,
    )


def _whole_call(call: _Call) -> FunctionToolCall:
    function = FunctionCall(name=call.name, arguments="".join(call.arguments))
    return FunctionToolCall(id=_call_id(), function=function)


def message_delta(piece: Piece, calls: int) -> MessageDelta:
    """Return what a streamed message gains by `piece`. `calls`: number of its call, from 1, if it belongs to one."""
    match piece:
        case ContentPiece(text):
            return MessageDelta(content=text)
        case ReasoningPiece(text):
            return MessageDelta(reasoning_content=text)
        case CallBegin(name):
            function = FunctionCallDelta(name=name, arguments="")
            begun = ToolCallDelta(index=calls - 1, id=_call_id(), type="function", function=function)
            return MessageDelta(tool_calls=[begun])
        case ArgumentsPiece(text):
            return MessageDelta(tool_calls=[ToolCallDelta(index=calls - 1, function=FunctionCallDelta(arguments=text))])
    assert_never(piece)


def _call_id() -> str:
    return f"call_{_RANDOM.getrandbits(96):024x}"
