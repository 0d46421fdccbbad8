"""Split one chat sample's text, whole or streamed, into pieces or into deltas of its message."""

from __future__ import annotations

from tok_client.types import Delta as MessageDelta
from tok_core import Delta
from tok_server.openai.generation.job import GenerationJob
from tok_server.openai.generation.logprobs import TokenTexts
from tok_server.parsing import CallBegin, ContentPiece, MessageReader, Piece, ReasoningCounter, message_delta


class SampleReader:
    """Reader of one chat sample. `texts`: holds the tokenizer, by which reasoning tokens are counted."""

    __slots__ = ("_calls", "_counter", "_reader")

    def __init__(self, job: GenerationJob, texts: TokenTexts) -> None:
        markup = job.markup
        self._reader = MessageReader(markup) if markup else None
        self._counter: ReasoningCounter | None = None
        if markup.reasoning and texts.tokenizer is not None:
            self._counter = ReasoningCounter(texts.tokenizer, markup.thinking)
        self._calls = 0  # tool calls reported so far

    @property
    def reasoning_tokens(self) -> int:
        """Return the number of reasoning tokens so far."""
        return self._counter.count if self._counter else 0

    def pieces(self, text: str, token_ids: list[int], *, ended: bool) -> list[Piece]:
        """Return the pieces that the sample gains by `text`. `ended`: no more text follows."""
        if self._counter is not None:
            self._counter.feed(token_ids)
        if self._reader is None:
            return [ContentPiece(text)] if text else []
        return self._reader.feed(text) + (self._reader.finish() if ended else [])

    def message_deltas(self, delta: Delta) -> list[MessageDelta]:
        """Return what the sample gains by `delta` as deltas of its message."""
        if self._reader is None:
            return [MessageDelta(content=delta.text)] if delta.text else []
        deltas = []
        for piece in self.pieces(delta.text, delta.token_ids, ended=delta.finish_reason is not None):
            self._calls += isinstance(piece, CallBegin)
            deltas.append(message_delta(piece, self._calls))
        return deltas

    def finish_reason(self, reason: str) -> str:
        """Return the API's name of the finish reason: "tool_calls" for a stop after a call."""
        called = self._reader is not None and self._reader.calls
        return "tool_calls" if called and reason == "stop" else reason

    def free(self) -> None:
        """Free the state that only a running sample needs."""
        self._reader = self._counter = None
