"""Parse generated text: reasoning, content, tool calls, and answers for `stop_when`."""

from __future__ import annotations

from tok_server.parsing.answer_pattern import AnswerPattern
from tok_server.parsing.formats import CallFormat, tool_call_format, writes_reasoning
from tok_server.parsing.markup import NO_MARKUP, Markup
from tok_server.parsing.message_reader import MessageReader, build_message, message_delta
from tok_server.parsing.pieces import ArgumentsPiece, CallBegin, ContentPiece, Piece, ReasoningPiece
from tok_server.parsing.reasoning import THINK_CLOSE, THINK_OPEN, ReasoningCounter
from tok_server.parsing.stop_when_rule import (
    StopWhenEvaluator,
    StopWhenRule,
    evaluate_stream,
    stop_when_result,
    wait_for_output,
)

__all__ = [
    "NO_MARKUP",
    "THINK_CLOSE",
    "THINK_OPEN",
    "AnswerPattern",
    "ArgumentsPiece",
    "CallBegin",
    "CallFormat",
    "ContentPiece",
    "Markup",
    "MessageReader",
    "Piece",
    "ReasoningCounter",
    "ReasoningPiece",
    "StopWhenEvaluator",
    "StopWhenRule",
    "build_message",
    "evaluate_stream",
    "message_delta",
    "stop_when_result",
    "tool_call_format",
    "wait_for_output",
    "writes_reasoning",
]
