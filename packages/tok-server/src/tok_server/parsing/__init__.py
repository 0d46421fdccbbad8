"""Parse generated text: split it into reasoning, content and tool calls."""

from __future__ import annotations

from tok_server.parsing.message_reader import NO_MARKUP, CallFormat, Markup, MessageReader, build_message
from tok_server.parsing.pieces import ArgumentsPiece, CallBegin, ContentPiece, Piece, ReasoningPiece
from tok_server.parsing.reasoning import THINK_CLOSE, THINK_OPEN

__all__ = [
    "NO_MARKUP",
    "THINK_CLOSE",
    "THINK_OPEN",
    "ArgumentsPiece",
    "CallBegin",
    "CallFormat",
    "ContentPiece",
    "Markup",
    "MessageReader",
    "Piece",
    "ReasoningPiece",
    "build_message",
]
