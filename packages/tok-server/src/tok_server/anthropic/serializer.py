"""Write the JSON of an answer to /v1/messages, whole or as events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

from tok_client.types import UNSET, StopWhenResult, Usage
from tok_core import Delta, RequestOutput
from tok_core.outputs import FinishReason
from tok_core.text import Tokenizer
from tok_server.anthropic.answer_types import (
    MessageAnswer,
    MessageDelta,
    MessageEnding,
    MessageEvent,
    MessageStart,
    MessageStop,
    MessageUsage,
    StopReason,
    ThinkingTokens,
)
from tok_server.anthropic.content import MessageContent
from tok_server.anthropic.errors import error_body
from tok_server.openai import GenerationJob, event, total_usage
from tok_server.parsing import MessageReader
from tok_server.wire import ApiError, encode


class MessagesSerializer:
    """Writer of the answer to one /v1/messages request. `tokenizer`: counts the tokens of reasoning."""

    max_logprobs: int | None = None

    def __init__(self, job: GenerationJob, tokenizer: Tokenizer | None) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._reader = MessageReader(job.markup, tokenizer)
        self._content = MessageContent()
        self._tokens = 0
        self._ending = MessageEnding("end_turn", None)

    def encode_answer(self, outputs: list[RequestOutput]) -> bytes:
        """Encode the whole message."""
        (output,) = outputs
        (sample,) = output.outputs
        reader, content = MessageReader(self._job.markup, self._tokenizer), MessageContent()
        content.add(reader.pieces(sample.text, sample.token_ids, ended=True))
        content.end()
        tokens = len(sample.token_ids)
        ending = self._make_ending(reader, sample.finish_reason, sample.stop_reason, tokens)
        return encode(
            MessageAnswer(
                id=self._job.id,
                model=self._job.model,
                content=content.blocks,
                stop_reason=ending.stop_reason,
                stop_sequence=ending.stop_sequence,
                usage=self._usage(total_usage(outputs, tokens), reader),
            )
        )

    def encode_pieces(self, outputs: list[RequestOutput]) -> Iterator[bytes]:
        """Yield the whole message in one piece: it is one sample without log-probabilities."""
        yield self.encode_answer(outputs)

    def encode_opening(self) -> bytes:
        """Encode the event that the message begins."""
        usage = MessageUsage(input_tokens=sum(map(len, self._job.prompts)), output_tokens=0)
        message = MessageAnswer(id=self._job.id, model=self._job.model, content=[], usage=usage)
        return _encode_events([MessageStart(message)])

    def encode_delta(self, prompt: int, delta: Delta) -> bytes:
        """Encode what the one sample gained."""
        self._tokens += len(delta.token_ids)
        reason = delta.finish_reason
        events = self._content.add(self._reader.pieces(delta.text, delta.token_ids, ended=reason is not None))
        if reason is not None:
            events += self._content.end()
            self._ending = self._make_ending(self._reader, reason, delta.stop_reason, self._tokens)
        return _encode_events(events)

    def encode_closing(self, token_usage: Usage, stop_when: StopWhenResult | None) -> bytes:
        """Encode the events that the message and the stream have ended."""
        return _encode_events([MessageDelta(self._ending, self._usage(token_usage, self._reader)), MessageStop()])

    def encode_failure(self, failure: ApiError) -> bytes:
        """Encode the event that reports the error, and ends the stream."""
        return b"event: error\n" + event(error_body(failure))

    def _make_ending(
        self, reader: MessageReader, reason: FinishReason, stopped_by: int | str | None, tokens: int
    ) -> MessageEnding:
        """Return why the sample of `tokens` tokens ended. A call counts more than a stop sequence after it."""
        stop_reason: StopReason = "end_turn"
        if reason == "length":
            stop_reason = "max_tokens" if tokens == self._job.params.max_tokens else "model_context_window_exceeded"
        elif reader.calls:
            stop_reason = "tool_use"
        elif isinstance(stopped_by, str):
            return MessageEnding("stop_sequence", stopped_by)
        return MessageEnding(stop_reason, None)

    def _usage(self, token_usage: Usage, reader: MessageReader) -> MessageUsage:
        details = token_usage.prompt_tokens_details
        cached = (details.cached_tokens or 0) if details else 0
        thinking = ThinkingTokens(thinking_tokens=reader.reasoning_tokens) if self._job.markup.reasoning else UNSET
        return MessageUsage(
            input_tokens=token_usage.prompt_tokens - cached,
            cache_read_input_tokens=cached,
            output_tokens=token_usage.completion_tokens,
            output_tokens_details=thinking,
        )


def _encode_events(events: Sequence[MessageEvent]) -> bytes:
    return b"".join([_first_line(type(one)) + event(encode(one)) for one in events])


@cache
def _first_line(kind: type[MessageEvent]) -> bytes:
    """Return the line with an event's name."""
    return f"event: {kind.__struct_config__.tag}\n".encode()
