"""Write the JSON of a response, whole or as events."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import count

import msgspec

from tok_client.types import (
    ChatTokenLogprob,
    IncompleteDetails,
    OutputTokensDetails,
    Response,
    ResponseCompleted,
    ResponseCreated,
    ResponseError,
    ResponseEvent,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseInputDetails,
    ResponseUsage,
    StopWhenResult,
    Usage,
)
from tok_core import Delta, RequestOutput, TokenLogprob
from tok_core.text import Detokeniser, Tokenizer
from tok_server.openai.generation import (
    MAX_RESPONSE_LOGPROBS,
    GenerationJob,
    TokenTexts,
    chat_logprobs,
    event,
    total_usage,
)
from tok_server.openai.responses.output import ResponseOutput
from tok_server.parsing import MessageReader
from tok_server.wire import ApiError, encode


class ResponseSerializer:
    """Writer of the answer to one /v1/responses request.

    initial  the response before any output: it repeats the request's settings
    texts    how tokens are shown
    """

    max_logprobs: int | None = MAX_RESPONSE_LOGPROBS

    def __init__(self, job: GenerationJob, initial: Response, texts: TokenTexts) -> None:
        self._job = job
        self.initial = initial
        self._texts = texts
        self._sequence_numbers = count()
        self._reader = MessageReader(job.markup, texts.tokenizer)
        self._output = ResponseOutput(self._sequence_numbers)
        self._splitter = self._make_splitter()
        self._truncated = False  # the sample ended with reason "length"

    def encode_answer(self, outputs: list[RequestOutput]) -> bytes:
        """Encode the whole response."""
        (output,) = outputs
        (sample,) = output.outputs
        reader, response_output = MessageReader(self._job.markup, self._texts.tokenizer), ResponseOutput(count())
        delta = Delta(0, sample.token_ids, sample.text, sample.logprobs, sample.finish_reason)
        for part_delta in _split_delta(delta, self._make_splitter()):
            _add_delta(part_delta, reader, response_output, self._logprobs(part_delta))
        token_usage = total_usage(outputs, len(sample.token_ids))
        return encode(
            self._final_response(
                response_output, sample.finish_reason == "length", _usage(token_usage, reader.reasoning_tokens)
            )
        )

    def encode_pieces(self, outputs: list[RequestOutput]) -> Iterator[bytes]:
        """Yield the whole response in one piece: `MAX_RESPONSE_LOGPROBS` bounds its size."""
        yield self.encode_answer(outputs)

    def encode_opening(self) -> bytes:
        """Encode the events that the response has been created and is in progress."""
        return _encode_events(
            [
                ResponseCreated(sequence_number=next(self._sequence_numbers), response=self.initial),
                ResponseInProgress(sequence_number=next(self._sequence_numbers), response=self.initial),
            ]
        )

    def encode_delta(self, prompt: int, delta: Delta) -> bytes:
        """Encode what the one sample gained."""
        self._truncated = delta.finish_reason == "length"
        events: list[ResponseEvent] = []
        for part_delta in _split_delta(delta, self._splitter):
            events += _add_delta(part_delta, self._reader, self._output, self._logprobs(part_delta))
        return _encode_events(events)

    def encode_closing(self, token_usage: Usage, stop_when: StopWhenResult | None) -> bytes:
        """Encode the event that the response is completed, or incomplete."""
        response = self._final_response(
            self._output, self._truncated, _usage(token_usage, self._reader.reasoning_tokens)
        )
        kind = ResponseIncomplete if self._truncated else ResponseCompleted
        return _encode_events([kind(sequence_number=next(self._sequence_numbers), response=response)])

    def encode_failure(self, failure: ApiError) -> bytes:
        """Encode the event that the response failed, and then the error event that other endpoints send."""
        error = ResponseError(
            code="server_error" if failure.status >= 500 else "invalid_prompt", message=failure.message
        )
        response = msgspec.structs.replace(self.initial, status="failed", error=error, output=self._output.items)
        failed = ResponseFailed(sequence_number=next(self._sequence_numbers), response=response)
        return _encode_events([failed]) + event(failure.body())

    def _final_response(self, response_output: ResponseOutput, truncated: bool, token_usage: ResponseUsage) -> Response:
        return msgspec.structs.replace(
            self.initial,
            status="incomplete" if truncated else "completed",
            incomplete_details=IncompleteDetails(reason="max_output_tokens") if truncated else None,
            output=response_output.items,
            usage=token_usage,
        )

    def _make_splitter(self) -> _DeltaSplitter | None:
        """Return a splitter if log-probabilities are requested: each stays beside the text of its token."""
        tokenizer = self._texts.tokenizer
        return None if self._job.params.logprobs is None or tokenizer is None else _DeltaSplitter(tokenizer)

    def _logprobs(self, delta: Delta) -> list[ChatTokenLogprob]:
        """Return the log-probabilities of the delta's tokens that show text."""
        if self._job.params.logprobs is None:
            return []
        shown: Sequence[TokenLogprob] = [one for one in delta.logprobs or () if self._texts.visible_bytes(one.token_id)]
        return chat_logprobs(shown, self._texts).content or []


class _DeltaSplitter:
    """Splitter of one sample's deltas into one delta per token, with its own text.

    Tokens whose text the engine withholds, since a stop string may begin there, wait for their text. Tokens of the stop
    string that ended the sample, and an end token, have no text: their log-probabilities are dropped.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._detokeniser = Detokeniser(tokenizer)
        self._waiting: deque[tuple[int, TokenLogprob, int]] = deque()  # token, its log-probability, length of its text
        self._text = ""  # known part of the waiting tokens' text

    def split(self, delta: Delta) -> Iterator[Delta]:
        """Yield a delta for each token whose text is known, and one for the end of the sample."""
        known, at = self._text + delta.text, 0
        for token, logprob in zip(delta.token_ids, delta.logprobs or [], strict=True):
            self._waiting.append((token, logprob, len(self._detokeniser.push_one(token))))
        ended = delta.finish_reason is not None
        while self._waiting and (ended or at + self._waiting[0][2] <= len(known)):
            token, logprob, size = self._waiting.popleft()
            text = known[at : at + size]
            at += size
            yield Delta(0, [token], text, [logprob] if text or not size else [])
        self._text = known[at:]
        if ended:
            yield Delta(0, [], self._text, finish_reason=delta.finish_reason)


def _split_delta(delta: Delta, splitter: _DeltaSplitter | None) -> Iterable[Delta]:
    return [delta] if splitter is None else splitter.split(delta)


def _add_delta(
    delta: Delta, reader: MessageReader, response_output: ResponseOutput, logprobs: list[ChatTokenLogprob]
) -> list[ResponseEvent]:
    pieces = reader.pieces(delta.text, delta.token_ids, ended=delta.finish_reason is not None)
    events = response_output.add(pieces, logprobs)
    if delta.finish_reason is not None:
        events += response_output.end(complete=delta.finish_reason != "length")
    return events


def _usage(token_usage: Usage, reasoning_tokens: int) -> ResponseUsage:
    details = token_usage.prompt_tokens_details
    return ResponseUsage(
        input_tokens=token_usage.prompt_tokens,
        input_tokens_details=ResponseInputDetails(cached_tokens=(details.cached_tokens or 0) if details else 0),
        output_tokens=token_usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=reasoning_tokens),
        total_tokens=token_usage.total_tokens,
    )


def _encode_events(response_events: Sequence[ResponseEvent]) -> bytes:
    return b"".join(b"event: " + one.type.encode() + b"\n" + event(encode(one)) for one in response_events)
