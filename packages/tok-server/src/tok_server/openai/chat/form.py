"""Write the JSON of chat answers. A streamed choice begins with its role and ends with an empty delta."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from tok_client.types import (
    UNSET,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    ChunkChoice,
    CompletionTokensDetails,
    Maybe,
    PromptLogprobs,
    StopWhenResult,
    Usage,
)
from tok_client.types import Delta as MessageDelta
from tok_core import Completion, Delta, RequestOutput, TokenLogprob
from tok_server.openai.generation import (
    ChunkForm,
    Job,
    SampleReader,
    TokenTexts,
    chat_logprobs,
    event,
    prompt_logprobs,
    running_usage,
    usage,
)
from tok_server.parsing import message, result_of
from tok_server.wire import TextEvent, elements, encode, filled, fingerprint, separated, slices, split, taken


class ChatForm(ChunkForm):
    """Writer of the answer to one chat request. `texts`: how tokens are shown."""

    def __init__(self, job: Job, texts: TokenTexts) -> None:
        super().__init__(job)
        self._texts = texts
        self._open: dict[int, SampleReader] = {}
        self._same: dict[int, TextEvent] = {}  # by running choice whose chunks hold only text
        self._tokens = 0
        self._reasoning_tokens = 0

    def whole(self, outputs: list[RequestOutput]) -> bytes:
        """Encode the answer of the one finished request."""
        (output,) = outputs
        choices = [self._choice(one, self._logprobs(one.logprobs)) for one in output.outputs]
        return encode(self._whole(outputs, choices, self._prompt_logprobs(output.prompt_logprobs)))

    def pieces(self, outputs: list[RequestOutput]) -> Iterator[bytes]:
        """Yield the same answer in pieces; free the log-probabilities of `outputs` along the way."""
        (output,) = outputs
        told: Maybe[PromptLogprobs] = [] if self._tells(output.prompt_logprobs) else UNSET
        before, _ = split(encode(self._whole(outputs, [], told)), "choices")
        yield before
        yield from separated(map(self._choice_pieces, output.outputs))
        # Encoded again: the usage counts reasoning tokens, which are known only after all choices have been read.
        _, after = split(encode(self._whole(outputs, [], told)), "choices")
        if told is UNSET:
            yield after
            return
        most = self._job.prompt_logprobs or 0
        parts = (prompt_logprobs(part, self._texts, most) for part in slices(output.prompt_logprobs or []))
        yield from filled(after, [("prompt_logprobs", elements(parts))])

    def _choice_pieces(self, one: Completion) -> Iterator[bytes]:
        if self._job.params.logprobs is None:
            return iter([encode(self._choice(one, None))])
        choice = encode(self._choice(one, ChatLogprobs(content=[])))
        parts = (chat_logprobs(part, self._texts).content or [] for part in taken(one.logprobs or []))
        return filled(choice, [("content", elements(parts))])

    def _whole(
        self, outputs: list[RequestOutput], choices: list[ChatChoice], told: Maybe[PromptLogprobs]
    ) -> ChatCompletion:
        (output,) = outputs
        return ChatCompletion(
            id=self._job.id,
            created=self._job.created,
            model=self._job.model,
            choices=choices,
            usage=self._detailed(usage(outputs, sum(len(one.token_ids) for one in output.outputs))),
            system_fingerprint=fingerprint(),
            prompt_logprobs=told,
            stop_when=result_of(outputs) or UNSET,
        )

    def events(self, prompt: int, delta: Delta) -> bytes:
        """Encode chunks: at first the role, then each gained piece, at last the finish reason."""
        index = delta.index
        self._tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._same.pop(index, None)
        elif delta.text and (same := self._same.get(index)) is not None:
            return same.of(delta.text)
        parts: list[ChunkChoice] = []
        sample = self._open.get(index)
        if sample is None:
            if self._plain and not self._job.markup and delta.finish_reason is None:
                self._same[index] = TextEvent(lambda text: self._text_chunk(index, text))
            sample = self._open[index] = SampleReader(self._job, self._texts)
            parts.append(ChunkChoice(index=index, delta=MessageDelta(role="assistant", content="")))
        gains = sample.gains(delta)
        if not gains and (delta.logprobs or (self._job.return_token_ids and delta.token_ids)):
            gains = [MessageDelta(content="")]
        parts += [self._gain(delta, gain, first=not number) for number, gain in enumerate(gains)]
        if delta.finish_reason:
            reason = sample.finish_reason(delta.finish_reason)
            parts.append(ChunkChoice(index=index, delta=MessageDelta(), finish_reason=reason))
            self._reasoning_tokens += sample.reasoning_tokens
            sample.end()
        used = self._used_so_far() if parts else UNSET
        return b"".join(event(encode(self._chunk([part], used))) for part in parts)

    def _text_chunk(self, index: int, text: str) -> ChatCompletionChunk:
        """Return the chunk of a running choice that gains only text."""
        return self._chunk([ChunkChoice(index=index, delta=MessageDelta(content=text))], self._used_so_far())

    def last_chunk(self, used: Usage | None, stop_when: StopWhenResult | None) -> bytes:
        return event(encode(self._chunk([], self._detailed(used) if used else UNSET, stop_when)))

    def _choice(self, one: Completion, logprobs: ChatLogprobs | None) -> ChatChoice:
        sample = SampleReader(self._job, self._texts)
        said = message(sample.pieces(one.text, one.token_ids, ended=True))
        self._reasoning_tokens += sample.reasoning_tokens
        return ChatChoice(
            index=one.index,
            message=said,
            logprobs=logprobs,
            finish_reason=sample.finish_reason(one.finish_reason),
            token_ids=one.token_ids if self._job.return_token_ids else UNSET,
        )

    def _gain(self, delta: Delta, gain: MessageDelta, *, first: bool) -> ChunkChoice:
        """Return one gain of a delta; the first carries the delta's log-probabilities and token ids."""
        return ChunkChoice(
            index=delta.index,
            delta=gain,
            logprobs=self._logprobs(delta.logprobs) if first else None,
            token_ids=delta.token_ids if first and self._job.return_token_ids else UNSET,
        )

    def _used_so_far(self) -> Maybe[Usage]:
        if not self._job.continuous_usage:
            return None if self._job.include_usage else UNSET
        return running_usage(self._job.prompts, self._tokens)

    def _detailed(self, used: Usage) -> Usage:
        if not self._job.markup.reasoning:
            return used
        details = CompletionTokensDetails(reasoning_tokens=self._reasoning_tokens)
        return msgspec.structs.replace(used, completion_tokens_details=details)

    def _logprobs(self, entries: list[TokenLogprob] | None) -> ChatLogprobs | None:
        if entries is None or self._job.params.logprobs is None:
            return None
        return chat_logprobs(entries, self._texts)

    def _prompt_logprobs(self, entries: list[TokenLogprob | None] | None) -> Maybe[PromptLogprobs]:
        if not self._tells(entries):
            return UNSET
        return prompt_logprobs(entries or [], self._texts, self._job.prompt_logprobs or 0)

    def _tells(self, entries: list[TokenLogprob | None] | None) -> bool:
        """Return whether log-probabilities of the prompt are requested and known."""
        return self._job.prompt_logprobs is not None and entries is not None

    def _chunk(
        self, choices: list[ChunkChoice], used: Maybe[Usage], stop_when: StopWhenResult | None = None
    ) -> ChatCompletionChunk:
        job = self._job
        return ChatCompletionChunk(
            id=job.id,
            created=job.created,
            model=job.model,
            choices=choices,
            usage=used,
            system_fingerprint=fingerprint(),
            stop_when=stop_when or UNSET,
        )
