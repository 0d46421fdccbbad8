"""Split a chat sample's text, as it arrives, into reasoning, content and tool calls; build messages of them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, assert_never

from tok_client.types import UNSET, ChatMessage, FunctionCall, FunctionCallDelta, FunctionToolCall, ToolCallDelta
from tok_client.types import Delta as MessageDelta
from tok_core import Delta
from tok_server.parsing.call_parser import CallParser
from tok_server.parsing.hermes import HermesParser
from tok_server.parsing.llama3 import Llama3Parser
from tok_server.parsing.pieces import ArgumentsPiece, CallBegin, ContentPiece, Piece, ReasoningPiece
from tok_server.parsing.reasoning import ReasoningCounter, ReasoningReader
from tok_server.wire import new_id

if TYPE_CHECKING:
    from tok_core.text import Tokenizer

CallFormat = Literal["hermes", "llama3"]


def call_parser(kind: CallFormat, tools: Container[str]) -> CallParser:
    """Return a parser for one sample."""
    return HermesParser(tools) if kind == "hermes" else Llama3Parser(tools)


@dataclass(frozen=True, slots=True)
class Markup:
    """The markup that a sample's text may hold.

    calls      format of tool calls; None: they are not parsed
    tools      names of the tools that may be called
    parallel   there may be more than one call; otherwise calls after the first are dropped
    reasoning  think blocks are separated from content
    thinking   the prompt has opened the think block
    """

    calls: CallFormat | None = None
    tools: frozenset[str] = frozenset()
    parallel: bool = True
    reasoning: bool = False
    thinking: bool = False

    def __bool__(self) -> bool:
        return self.calls is not None or self.reasoning


NO_MARKUP = Markup()
"""All text is content."""


class MessageReader:
    """Reader of one sample's text, whole or in parts. However the text is cut, the joined pieces are the same.

    tokenizer  counts the reasoning tokens; None: they are not counted
    calls      tool calls so far, including those that are dropped
    """

    __slots__ = ("_counter", "_max_calls", "_parser", "_plain", "_reasoning_reader", "_reported_calls", "calls")

    def __init__(self, markup: Markup, tokenizer: Tokenizer | None = None) -> None:
        self._plain = not markup
        self._reasoning_reader = ReasoningReader(markup.thinking) if markup.reasoning else None
        self._counter = (
            ReasoningCounter(tokenizer, markup.thinking) if markup.reasoning and tokenizer is not None else None
        )
        self._parser = call_parser(markup.calls, markup.tools) if markup.calls else None
        self._max_calls = None if markup.parallel else 1
        self._reported_calls = 0  # those of which `message_deltas` has returned the beginning
        self.calls = 0

    @property
    def reasoning_tokens(self) -> int:
        """Return the number of reasoning tokens so far."""
        return self._counter.count if self._counter else 0

    def pieces(self, text: str, token_ids: Sequence[int] = (), *, ended: bool) -> list[Piece]:
        """Return the pieces that the sample gains by `text` of `token_ids`. `ended`: no more text follows."""
        if self._plain:
            return [ContentPiece(text)] if text else []
        if self._counter is not None:
            self._counter.feed(token_ids)
        return self.feed(text) + (self.finish() if ended else [])

    def message_deltas(self, delta: Delta) -> list[MessageDelta]:
        """Return what the sample gains by `delta` as deltas of its message."""
        if self._plain:
            return [MessageDelta(content=delta.text)] if delta.text else []
        deltas = []
        for piece in self.pieces(delta.text, delta.token_ids, ended=delta.finish_reason is not None):
            self._reported_calls += isinstance(piece, CallBegin)
            deltas.append(_message_delta(piece, self._reported_calls))
        return deltas

    def finish_reason(self, reason: str) -> str:
        """Return the API's name of the finish reason: "tool_calls" for a stop after a call."""
        return "tool_calls" if self.calls and reason == "stop" else reason

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
    return FunctionToolCall(id=new_id("call", "_"), function=function)


def _message_delta(piece: Piece, calls: int) -> MessageDelta:
    """Return what a streamed message gains by `piece`. `calls`: number of its call, from 1, if it belongs to one."""
    match piece:
        case ContentPiece(text):
            return MessageDelta(content=text)
        case ReasoningPiece(text):
            return MessageDelta(reasoning_content=text)
        case CallBegin(name):
            function = FunctionCallDelta(name=name, arguments="")
            begun = ToolCallDelta(index=calls - 1, id=new_id("call", "_"), type="function", function=function)
            return MessageDelta(tool_calls=[begun])
        case ArgumentsPiece(text):
            return MessageDelta(tool_calls=[ToolCallDelta(index=calls - 1, function=FunctionCallDelta(arguments=text))])
    assert_never(piece)
