"""Write the JSON of a response, whole or as events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from tok_core.text import Detokeniser
from tok_server.openai.generation import (
    MAX_RESPONSE_LOGPROBS,
    Job,
    SampleReader,
    TokenTexts,
    chat_logprobs,
    event,
    usage,
)
from tok_server.openai.responses.output import ResponseOutput
from tok_server.wire import ApiError, encode


class ResponseForm:
    """Writer of the answer to one /v1/responses request.

    begun  the response before any output: it repeats the request's settings
    texts  how tokens are shown
    """

    most_logprobs: int | None = MAX_RESPONSE_LOGPROBS

    def __init__(self, job: Job, begun: Response, texts: TokenTexts) -> None:
        self._job = job
        self._begun = begun
        self._texts = texts
        self._numbers = count()
        self._reader = SampleReader(job, texts)
        self._output = ResponseOutput(self._numbers)
        self._detokeniser = self._make_detokeniser()
        self._cut = False  # the sample ended with reason "length"

    def whole(self, outputs: list[RequestOutput]) -> bytes:
        """Encode the whole response."""
        (output,) = outputs
        (sample,) = output.outputs
        reader, written = SampleReader(self._job, self._texts), ResponseOutput(count())
        delta = Delta(0, sample.token_ids, sample.text, sample.logprobs, sample.finish_reason)
        for step in _steps(delta, self._make_detokeniser()):
            _read(step, reader, written, self._logprobs(step))
        used = usage(outputs, len(sample.token_ids))
        return encode(self._ended(written, sample.finish_reason == "length", _usage(used, reader.reasoning_tokens)))

    def pieces(self, outputs: list[RequestOutput]) -> Iterator[bytes]:
        """Yield the whole response in one piece: `MAX_RESPONSE_LOGPROBS` bounds its size."""
        yield self.whole(outputs)

    def opening(self) -> bytes:
        """Encode the events that the response has been created and is in progress."""
        return _events(
            [
                ResponseCreated(sequence_number=next(self._numbers), response=self._begun),
                ResponseInProgress(sequence_number=next(self._numbers), response=self._begun),
            ]
        )

    def events(self, prompt: int, delta: Delta) -> bytes:
        """Encode what the one sample gained."""
        self._cut = delta.finish_reason == "length"
        events: list[ResponseEvent] = []
        for step in _steps(delta, self._detokeniser):
            events += _read(step, self._reader, self._output, self._logprobs(step))
        return _events(events)

    def closing(self, used: Usage, stop_when: StopWhenResult | None) -> bytes:
        """Encode the event that the response is completed, or incomplete."""
        response = self._ended(self._output, self._cut, _usage(used, self._reader.reasoning_tokens))
        kind = ResponseIncomplete if self._cut else ResponseCompleted
        return _events([kind(sequence_number=next(self._numbers), response=response)])

    def failed(self, failure: ApiError) -> bytes:
        """Encode the event that the response failed, and then the error event that other endpoints send."""
        error = ResponseError(
            code="server_error" if failure.status >= 500 else "invalid_prompt", message=failure.message
        )
        response = msgspec.structs.replace(self._begun, status="failed", error=error, output=self._output.items)
        told = ResponseFailed(sequence_number=next(self._numbers), response=response)
        return _events([told]) + event(failure.body())

    def _ended(self, written: ResponseOutput, cut: bool, used: ResponseUsage) -> Response:
        return msgspec.structs.replace(
            self._begun,
            status="incomplete" if cut else "completed",
            incomplete_details=IncompleteDetails(reason="max_output_tokens") if cut else None,
            output=written.items,
            usage=used,
        )

    def _make_detokeniser(self) -> Detokeniser | None:
        """Return a detokeniser if text must be read per token, to separate log-probabilities of text and of markup."""
        tokenizer = self._texts.tokenizer
        if self._job.params.logprobs is None or not self._job.markup or tokenizer is None:
            return None
        return Detokeniser(tokenizer)

    def _logprobs(self, delta: Delta) -> list[ChatTokenLogprob]:
        """Return the log-probabilities of the delta's tokens that show text."""
        if self._job.params.logprobs is None:
            return []
        shown: Sequence[TokenLogprob] = [one for one in delta.logprobs or () if self._texts.shown(one.token_id)]
        return chat_logprobs(shown, self._texts).content or []


def _steps(delta: Delta, detokeniser: Detokeniser | None) -> Iterator[Delta]:
    """Yield the delta itself or, given the sample's detokeniser, one delta per token."""
    if detokeniser is None:
        yield delta
        return
    ids, reason = delta.token_ids, delta.finish_reason
    for place, (token, logprob) in enumerate(zip(ids, delta.logprobs or [], strict=True)):
        end = reason == "stop" and place == len(ids) - 1  # the end token, which is not shown
        yield Delta(0, [token], "" if end else detokeniser.push_one(token), [logprob])
    if reason is not None:
        yield Delta(0, [], detokeniser.finish(), finish_reason=reason)


def _read(
    delta: Delta, reader: SampleReader, written: ResponseOutput, logprobs: list[ChatTokenLogprob]
) -> list[ResponseEvent]:
    pieces = reader.pieces(delta.text, delta.token_ids, ended=delta.finish_reason is not None)
    events = written.take(pieces, logprobs)
    if delta.finish_reason is not None:
        events += written.end(whole=delta.finish_reason != "length")
    return events


def _usage(used: Usage, reasoning_tokens: int) -> ResponseUsage:
    details = used.prompt_tokens_details
    return ResponseUsage(
        input_tokens=used.prompt_tokens,
        input_tokens_details=ResponseInputDetails(cached_tokens=(details.cached_tokens or 0) if details else 0),
        output_tokens=used.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=reasoning_tokens),
        total_tokens=used.total_tokens,
    )


def _events(told: Sequence[ResponseEvent]) -> bytes:
    return b"".join(b"event: " + one.type.encode() + b"\n" + event(encode(one)) for one in told)
