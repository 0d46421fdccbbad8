"""Parse generated text: reasoning, content, tool calls, and answers for `stop_when`."""

from __future__ import annotations

from tok_server.parsing.answer_pattern import AnswerPattern
from tok_server.parsing.formats import CallFormat, tool_call_format, writes_reasoning
from tok_server.parsing.markup import NO_MARKUP, Markup
from tok_server.parsing.message_reader import MessageReader, message, message_delta
from tok_server.parsing.pieces import Arguments, CallBegin, Piece, ReasoningPiece, Text
from tok_server.parsing.reasoning import THINK_CLOSE, THINK_OPEN, ReasoningCounter
from tok_server.parsing.stop_when_rule import StopWhenJudge, StopWhenRule, judged, output_of, result_of

__all__ = [
    "NO_MARKUP",
    "THINK_CLOSE",
    "THINK_OPEN",
    "AnswerPattern",
    "Arguments",
    "CallBegin",
    "CallFormat",
    "Markup",
    "MessageReader",
    "Piece",
    "ReasoningCounter",
    "ReasoningPiece",
    "StopWhenJudge",
    "StopWhenRule",
    "Text",
    "judged",
    "message",
    "message_delta",
    "output_of",
    "result_of",
    "tool_call_format",
    "writes_reasoning",
]
