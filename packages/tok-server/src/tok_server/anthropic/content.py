"""Assemble the blocks of one answer while the model generates them, and the events that report them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

import msgspec

from tok_server.anthropic.answer_types import (
    AnswerBlock,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputJsonDelta,
    MessageEvent,
    SignatureDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from tok_server.parsing import ArgumentsPiece, CallBegin, ContentPiece, Piece, ReasoningPiece
from tok_server.wire import new_id

NO_INPUT = msgspec.Raw(b"{}")


class MessageContent:
    """The content of one answer. `blocks`: blocks that have ended."""

    def __init__(self) -> None:
        self.blocks: list[AnswerBlock] = []
        self._open: AnswerBlock | None = None  # empty: its text is in `_texts`
        self._texts: list[str] = []

    def add(self, pieces: Iterable[Piece]) -> list[MessageEvent]:
        """Add pieces of the answer; return the events that report them."""
        events: list[MessageEvent] = []
        for piece in pieces:
            if self._begins_block(piece):
                events += self._close()
                events.append(self._begin(_empty_block(piece)))
            if not isinstance(piece, CallBegin):
                self._texts.append(piece.text)
                events.append(ContentBlockDelta(len(self.blocks), _delta(piece)))
        return events

    def end(self) -> list[MessageEvent]:
        """End the last block; return the events. An answer without blocks gets an empty text: clients expect one."""
        if self._open is not None:
            return self._close()
        return [self._begin(TextBlock()), *self._close()] if not self.blocks else []

    def _begins_block(self, piece: Piece) -> bool:
        match piece:
            case ContentPiece():
                return not isinstance(self._open, TextBlock)
            case ReasoningPiece():
                return not isinstance(self._open, ThinkingBlock)
            case CallBegin():
                return True
            case ArgumentsPiece():
                return False
        assert_never(piece)

    def _begin(self, block: AnswerBlock) -> ContentBlockStart:
        self._open = block
        return ContentBlockStart(len(self.blocks), block)

    def _close(self) -> list[MessageEvent]:
        if self._open is None:
            return []
        index, text, events = len(self.blocks), "".join(self._texts), list[MessageEvent]()
        match self._open:
            case TextBlock():
                self.blocks.append(TextBlock(text=text))
            case ThinkingBlock() as block:
                self.blocks.append(ThinkingBlock(thinking=text))
                events.append(ContentBlockDelta(index, SignatureDelta(block.signature)))  # clients wait for it
            case ToolUseBlock() as block:
                self.blocks.append(msgspec.structs.replace(block, input=msgspec.Raw(text.encode())))
        self._open, self._texts = None, []
        return [*events, ContentBlockStop(index)]


def _empty_block(piece: Piece) -> AnswerBlock:
    match piece:
        case CallBegin(name):
            return ToolUseBlock(id=new_id("toolu", "_"), name=name, input=NO_INPUT)
        case ReasoningPiece():
            return ThinkingBlock()
        case _:
            return TextBlock()


def _delta(piece: ContentPiece | ReasoningPiece | ArgumentsPiece) -> TextDelta | ThinkingDelta | InputJsonDelta:
    match piece:
        case ContentPiece(text):
            return TextDelta(text)
        case ReasoningPiece(text):
            return ThinkingDelta(text)
        case ArgumentsPiece(text):
            return InputJsonDelta(text)
    assert_never(piece)
