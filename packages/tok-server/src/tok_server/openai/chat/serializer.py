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
    ChunkSerializer,
    GenerationJob,
    TextEvent,
    TokenTexts,
    chat_logprobs,
    event,
    prompt_logprobs,
    running_usage,
    stop_when_result,
    total_usage,
)
from tok_server.parsing import MessageReader, build_message
from tok_server.wire import (
    encode,
    encode_elements,
    fill_lists,
    fingerprint,
    join_with_commas,
    pop_slices,
    slices,
    split_at_list,
)


class ChatSerializer(ChunkSerializer):
    """Writer of the answer to one chat request. `texts`: how tokens are shown."""

    def __init__(self, job: GenerationJob, texts: TokenTexts) -> None:
        super().__init__(job)
        self._texts = texts
        self._readers: dict[int, MessageReader] = {}  # by running choice
        self._text_events: dict[int, TextEvent] = {}  # by running choice whose chunks hold only text
        self._tokens = 0
        self._reasoning_tokens = 0

    def encode_answer(self, outputs: list[RequestOutput]) -> bytes:
        """Encode the answer of the one finished request."""
        (output,) = outputs
        choices = [self._choice(one, self._logprobs(one.logprobs)) for one in output.outputs]
        return encode(self._completion(outputs, choices, self._prompt_logprobs(output.prompt_logprobs)))

    def encode_pieces(self, outputs: list[RequestOutput]) -> Iterator[bytes]:
        """Yield the same answer in pieces; free the log-probabilities of `outputs` along the way."""
        (output,) = outputs
        prompt_entries: Maybe[PromptLogprobs] = [] if self._has_prompt_logprobs(output.prompt_logprobs) else UNSET
        before, _ = split_at_list(encode(self._completion(outputs, [], prompt_entries)), "choices")
        yield before
        yield from join_with_commas(map(self._choice_pieces, output.outputs))
        # Encoded again: the usage counts reasoning tokens, which are known only after all choices have been read.
        _, after = split_at_list(encode(self._completion(outputs, [], prompt_entries)), "choices")
        if prompt_entries is UNSET:
            yield after
            return
        top_logprobs = self._job.prompt_logprobs or 0
        parts = (prompt_logprobs(part, self._texts, top_logprobs) for part in slices(output.prompt_logprobs or []))
        yield from fill_lists(after, [("prompt_logprobs", encode_elements(parts))])

    def _choice_pieces(self, one: Completion) -> Iterator[bytes]:
        if self._job.params.logprobs is None:
            return iter([encode(self._choice(one, None))])
        choice = encode(self._choice(one, ChatLogprobs(content=[])))
        parts = (chat_logprobs(part, self._texts).content or [] for part in pop_slices(one.logprobs or []))
        return fill_lists(choice, [("content", encode_elements(parts))])

    def _completion(
        self, outputs: list[RequestOutput], choices: list[ChatChoice], prompt_entries: Maybe[PromptLogprobs]
    ) -> ChatCompletion:
        (output,) = outputs
        return ChatCompletion(
            id=self._job.id,
            created=self._job.created,
            model=self._job.model,
            choices=choices,
            usage=self._with_reasoning_tokens(total_usage(outputs, sum(len(one.token_ids) for one in output.outputs))),
            system_fingerprint=fingerprint(),
            prompt_logprobs=prompt_entries,
            stop_when=stop_when_result(outputs) or UNSET,
        )

    def encode_delta(self, prompt: int, delta: Delta) -> bytes:
        """Encode chunks: at first the role, then each gained piece, at last the finish reason."""
        index = delta.index
        self._tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._text_events.pop(index, None)
        elif delta.text and (text_event := self._text_events.get(index)) is not None:
            return text_event.encode(delta.text)
        chunk_choices: list[ChunkChoice] = []
        sample = self._readers.get(index)
        if sample is None:
            if self._plain and not self._job.markup and delta.finish_reason is None:
                self._text_events[index] = TextEvent(lambda text: self._text_chunk(index, text))
            sample = self._readers[index] = MessageReader(self._job.markup, self._texts.tokenizer)
            chunk_choices.append(ChunkChoice(index=index, delta=MessageDelta(role="assistant", content="")))
        message_deltas = sample.message_deltas(delta)
        if not message_deltas and (delta.logprobs or (self._job.return_token_ids and delta.token_ids)):
            message_deltas = [MessageDelta(content="")]
        chunk_choices += [
            self._delta_choice(delta, message_delta, first=not number)
            for number, message_delta in enumerate(message_deltas)
        ]
        if delta.finish_reason:
            reason = sample.finish_reason(delta.finish_reason)
            chunk_choices.append(ChunkChoice(index=index, delta=MessageDelta(), finish_reason=reason))
            self._reasoning_tokens += sample.reasoning_tokens
            del self._readers[index]
        token_usage = self._running_usage() if chunk_choices else UNSET
        return b"".join(event(encode(self._chunk([part], token_usage))) for part in chunk_choices)

    def _text_chunk(self, index: int, text: str) -> ChatCompletionChunk:
        """Return the chunk of a running choice that gains only text."""
        return self._chunk([ChunkChoice(index=index, delta=MessageDelta(content=text))], self._running_usage())

    def encode_last_chunk(self, token_usage: Usage | None, stop_when: StopWhenResult | None) -> bytes:
        return event(
            encode(self._chunk([], self._with_reasoning_tokens(token_usage) if token_usage else UNSET, stop_when))
        )

    def _choice(self, one: Completion, logprobs: ChatLogprobs | None) -> ChatChoice:
        sample = MessageReader(self._job.markup, self._texts.tokenizer)
        chat_message = build_message(sample.pieces(one.text, one.token_ids, ended=True))
        self._reasoning_tokens += sample.reasoning_tokens
        return ChatChoice(
            index=one.index,
            message=chat_message,
            logprobs=logprobs,
            finish_reason=sample.finish_reason(one.finish_reason),
            token_ids=one.token_ids if self._job.return_token_ids else UNSET,
        )

    def _delta_choice(self, delta: Delta, message_delta: MessageDelta, *, first: bool) -> ChunkChoice:
        """Return one gain of a delta; the first carries the delta's log-probabilities and token ids."""
        return ChunkChoice(
            index=delta.index,
            delta=message_delta,
            logprobs=self._logprobs(delta.logprobs) if first else None,
            token_ids=delta.token_ids if first and self._job.return_token_ids else UNSET,
        )

    def _running_usage(self) -> Maybe[Usage]:
        if not self._job.continuous_usage:
            return None if self._job.include_usage else UNSET
        return running_usage(self._job.prompts, self._tokens)

    def _with_reasoning_tokens(self, token_usage: Usage) -> Usage:
        if not self._job.markup.reasoning:
            return token_usage
        details = CompletionTokensDetails(reasoning_tokens=self._reasoning_tokens)
        return msgspec.structs.replace(token_usage, completion_tokens_details=details)

    def _logprobs(self, entries: list[TokenLogprob] | None) -> ChatLogprobs | None:
        if entries is None or self._job.params.logprobs is None:
            return None
        return chat_logprobs(entries, self._texts)

    def _prompt_logprobs(self, entries: list[TokenLogprob | None] | None) -> Maybe[PromptLogprobs]:
        if not self._has_prompt_logprobs(entries):
            return UNSET
        return prompt_logprobs(entries or [], self._texts, self._job.prompt_logprobs or 0)

    def _has_prompt_logprobs(self, entries: list[TokenLogprob | None] | None) -> bool:
        """Return whether log-probabilities of the prompt are requested and known."""
        return self._job.prompt_logprobs is not None and entries is not None

    def _chunk(
        self, choices: list[ChunkChoice], token_usage: Maybe[Usage], stop_when: StopWhenResult | None = None
    ) -> ChatCompletionChunk:
        job = self._job
        return ChatCompletionChunk(
            id=job.id,
            created=job.created,
            model=job.model,
            choices=choices,
            usage=token_usage,
            system_fingerprint=fingerprint(),
            stop_when=stop_when or UNSET,
        )
