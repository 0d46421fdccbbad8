"""Interface of the serializers, which write answers as JSON or events, and the parts that they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, Protocol, Self, TypeVar

import msgspec

from tok_client.types import UNSET, Maybe, PromptTokensDetails, StopWhenResult, Usage
from tok_core import Delta, RequestOutput
from tok_core.text import Tokenizer
from tok_server.openai.generation.job import GenerationJob
from tok_server.wire import ApiError, encode, fingerprint

Choice = TypeVar("Choice")

DONE = b"data: [DONE]\n\n"

PLACEHOLDER = "\0text\0"  # stands for the text; names of models and ids do not contain NUL
QUOTED_PLACEHOLDER = encode(PLACEHOLDER)


class EventSerializer(Protocol):
    """Writer of one endpoint's server-sent events for one request.

    max_logprobs  limit of an answer's log-probabilities, streamed or not; None: `MAX_LOGPROBS`; streams unlimited
    """

    max_logprobs: int | None

    def encode_delta(self, prompt: int, delta: Delta) -> bytes:
        """Encode the gain of a sample of prompt number `prompt` as server-sent events; b"" if there is none.

        Called on the event loop, or in a thread if both `max_logprobs` and the request's logprobs are set.
        """

    def encode_opening(self) -> bytes:
        """Encode the server-sent events that precede any token."""

    def encode_closing(self, token_usage: Usage, stop_when: StopWhenResult | None) -> bytes:
        """Encode the server-sent events that follow the end of all samples."""

    def encode_failure(self, failure: ApiError) -> bytes:
        """Encode the last server-sent events of a stream that failed."""


class AnswerSerializer(EventSerializer, Protocol):
    """Writer of one endpoint's JSON for one request, whole or as events."""

    def encode_answer(self, outputs: list[RequestOutput]) -> bytes:
        """Encode the whole answer. Called in a thread unless the answer is short."""

    def encode_pieces(self, outputs: list[RequestOutput]) -> Iterator[bytes]:
        """Yield the same answer in pieces that are quick to make. Called in a thread. May consume `outputs`."""


def event(data: bytes) -> bytes:
    """Return `data` as one server-sent event."""
    return b"data: " + data + b"\n\n"


class TextEvent:
    """Template for the events of one choice. Most events of a stream differ only in their text.

    chunk  returns the chunk by which the choice gains a text
    """

    __slots__ = ("_after", "_before")

    def __init__(self, chunk: Callable[[str], msgspec.Struct]) -> None:
        before, after = encode(chunk(PLACEHOLDER)).split(QUOTED_PLACEHOLDER)
        self._before, self._after = b"data: " + before, after + b"\n\n"

    def encode(self, text: str) -> bytes:
        """Return the event for `text`."""
        return self._before + encode(text) + self._after


class TokenTexts:
    """Texts and bytes of tokens; without a tokenizer, a token is shown by its id.

    skip_special_tokens  special tokens add nothing to the text
    as_ids               log-probabilities name tokens by their ids, "token_id:42"
    """

    def __init__(self, tokenizer: Tokenizer | None, *, skip_special_tokens: bool = True, as_ids: bool = False) -> None:
        self.tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._as_ids = as_ids

    @classmethod
    def of(cls, tokenizer: Tokenizer | None, job: GenerationJob) -> Self:
        """Return the texts as the job's request asks for them."""
        return cls(tokenizer, skip_special_tokens=job.params.skip_special_tokens, as_ids=job.tokens_as_ids)

    def piece(self, token: int) -> bytes:
        """Return the token's bytes."""
        return self.tokenizer.piece(token) if self.tokenizer else f"token_id:{token}".encode()

    def visible_bytes(self, token: int) -> bytes:
        """Return the bytes that the token adds to the text: by default none for special tokens."""
        return self.tokenizer.pieces_of([token], self._skip_special_tokens)[0] if self.tokenizer else b""

    def own_text(self, token_ids: Sequence[int]) -> list[bytes]:
        """Return the bytes that each token adds to a text of their own, which may lack the first token's space."""
        if self.tokenizer is None:
            return [b""] * len(token_ids)
        return self.tokenizer.own_text(token_ids, self._skip_special_tokens)

    def name(self, token: int, prefix: str) -> str:
        """Return what log-probabilities call the token: its `text`, or its id."""
        return f"token_id:{token}" if self._as_ids else self.text(token, prefix)

    def text(self, token: int, prefix: str) -> str:
        """Return the token's text or, if it is not UTF-8, `prefix` and its escaped bytes."""
        piece = self.piece(token)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return prefix + "".join(f"\\x{byte:02x}" for byte in piece)


class HasPrompt(Protocol):
    """A finished or streaming request, as far as its prompt is concerned."""

    @property
    def prompt_token_ids(self) -> list[int]: ...
    @property
    def cached_tokens(self) -> int: ...


def total_usage(requests: Iterable[HasPrompt], completion_tokens: int) -> Usage:
    """Return the usage of one HTTP request, over all its prompts."""
    prompt_tokens = cached_tokens = 0
    for one in requests:
        prompt_tokens += len(one.prompt_token_ids)
        cached_tokens += one.cached_tokens
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
    )


def running_usage(prompts: Iterable[Sequence[int]], completion_tokens: int) -> Usage:
    """Return the usage so far of a streamed answer; cached tokens are reported only at its end."""
    prompt_tokens = sum(map(len, prompts))
    return Usage(
        prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, total_tokens=prompt_tokens + completion_tokens
    )


class ChunkSerializer(ABC, Generic[Choice]):
    """Base of the serializers of completions and chats. Each chunk of their streams has one choice.

    texts      how tokens are shown
    _plain     chunks report only text, no log-probabilities, ids or usage
    _envelope  members that every answer and chunk has
    """

    max_logprobs: int | None = None

    def __init__(self, job: GenerationJob, texts: TokenTexts) -> None:
        self._job = job
        self._texts = texts
        self._plain = job.params.logprobs is None and not (job.return_token_ids or job.continuous_usage)
        self._envelope: dict[str, Any] = {
            "id": job.id,
            "created": job.created,
            "model": job.model,
            "system_fingerprint": fingerprint(),
        }
        self._text_events: dict[int, TextEvent] = {}  # by running choice whose chunks hold only text
        self._tokens = 0

    def encode_opening(self) -> bytes:
        """Return no events: choices begin with their first token."""
        return b""

    def encode_delta(self, prompt: int, delta: Delta) -> bytes:
        """Encode the chunks by which choice number prompt × n + sample gains `delta`."""
        self._tokens += len(delta.token_ids)
        index = prompt * self._job.params.n + delta.index
        if delta.finish_reason is not None:
            self._text_events.pop(index, None)
        elif delta.text and (text_event := self._text_events.get(index)) is not None:
            return text_event.encode(delta.text)
        choices = self._chunk_choices(prompt, index, delta)
        token_usage = self._running_usage() if choices else UNSET
        return b"".join([event(encode(self._chunk([choice], token_usage))) for choice in choices])

    def encode_closing(self, token_usage: Usage, stop_when: StopWhenResult | None) -> bytes:
        """Encode the chunk without choices, if there is usage or a result to carry, and the end mark [DONE]."""
        if not self._job.include_usage and stop_when is None:
            return DONE
        reported_usage = self._detailed_usage(token_usage) if self._job.include_usage else UNSET
        return event(encode(self._chunk([], reported_usage, stop_when or UNSET))) + DONE

    def encode_failure(self, failure: ApiError) -> bytes:
        """Encode the error as an event in place of a chunk."""
        return event(failure.body())

    @abstractmethod
    def _chunk_choices(self, prompt: int, index: int, delta: Delta) -> list[Choice]:
        """Return what choice `index` gains, one entry per chunk."""

    @abstractmethod
    def _chunk(
        self, choices: list[Choice], token_usage: Maybe[Usage], stop_when: Maybe[StopWhenResult] = UNSET
    ) -> msgspec.Struct:
        """Return one chunk."""

    def _expect_text(self, index: int, choice: Callable[[str], Choice]) -> None:
        """Encode the choice's next chunks by a template: each holds only a text, as `choice` returns it."""
        self._text_events[index] = TextEvent(lambda text: self._chunk([choice(text)], self._running_usage()))

    def _detailed_usage(self, token_usage: Usage) -> Usage:
        return token_usage

    def _running_usage(self) -> Maybe[Usage]:
        if not self._job.continuous_usage:
            return None if self._job.include_usage else UNSET
        return running_usage(self._job.prompts, self._tokens)

    def _token_ids(self, token_ids: list[int]) -> Maybe[list[int]]:
        return token_ids if self._job.return_token_ids else UNSET
