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
    TokenTexts,
    chat_logprobs,
    prompt_logprobs,
    stop_when_result,
    total_usage,
)
from tok_server.parsing import MessageReader, build_message
from tok_server.wire import encode, encode_elements, fill_lists, join_with_commas, pop_slices, split_at_list


class ChatSerializer(ChunkSerializer[ChunkChoice]):
    """Writer of the answer to one chat request."""

    def __init__(self, job: GenerationJob, texts: TokenTexts) -> None:
        super().__init__(job, texts)
        self._readers: dict[int, MessageReader] = {}  # by running choice
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
        parts = (prompt_logprobs(part, self._texts, top_logprobs) for part in pop_slices(output.prompt_logprobs or []))
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
            choices=choices,
            usage=self._detailed_usage(total_usage(outputs, sum(len(one.token_ids) for one in output.outputs))),
            prompt_token_ids=self._token_ids(self._job.prompts[0]),
            prompt_logprobs=prompt_entries,
            stop_when=stop_when_result(outputs) or UNSET,
            **self._envelope,
        )

    def _chunk_choices(self, prompt: int, index: int, delta: Delta) -> list[ChunkChoice]:
        """Return the role at first, then each gained piece, and the finish reason at last."""
        choices: list[ChunkChoice] = []
        reader = self._readers.get(index)
        if reader is None:
            if self._plain and not self._job.markup and delta.finish_reason is None:
                self._expect_text(index, lambda text: ChunkChoice(index=index, delta=MessageDelta(content=text)))
            reader = self._readers[index] = self._reader()
            choices.append(ChunkChoice(index=index, delta=MessageDelta(role="assistant", content="")))
        message_deltas = reader.message_deltas(delta)
        if not message_deltas and (delta.logprobs or (self._job.return_token_ids and delta.token_ids)):
            message_deltas = [MessageDelta(content="")]
        logprobs, token_ids = self._logprobs(delta.logprobs), self._token_ids(delta.token_ids)
        for message_delta in message_deltas:  # the first carries the delta's log-probabilities and token ids
            choices.append(ChunkChoice(index=index, delta=message_delta, logprobs=logprobs, token_ids=token_ids))
            logprobs, token_ids = None, UNSET
        if delta.finish_reason:
            reason = reader.finish_reason(delta.finish_reason)
            choices.append(ChunkChoice(index=index, delta=MessageDelta(), finish_reason=reason))
            self._reasoning_tokens += reader.reasoning_tokens
            del self._readers[index]
        return choices

    def _reader(self) -> MessageReader:
        return MessageReader(self._job.markup, self._texts.tokenizer)

    def _choice(self, one: Completion, logprobs: ChatLogprobs | None) -> ChatChoice:
        reader = self._reader()
        chat_message = build_message(reader.pieces(one.text, one.token_ids, ended=True))
        self._reasoning_tokens += reader.reasoning_tokens
        return ChatChoice(
            index=one.index,
            message=chat_message,
            logprobs=logprobs,
            finish_reason=reader.finish_reason(one.finish_reason),
            token_ids=self._token_ids(one.token_ids),
        )

    def _detailed_usage(self, token_usage: Usage) -> Usage:
        """Add the number of reasoning tokens, if the model writes reasoning."""
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
        self, choices: list[ChunkChoice], token_usage: Maybe[Usage], stop_when: Maybe[StopWhenResult] = UNSET
    ) -> ChatCompletionChunk:
        begins = any(choice.delta.role is not UNSET for choice in choices)
        return ChatCompletionChunk(
            choices=choices,
            usage=token_usage,
            prompt_token_ids=self._token_ids(self._job.prompts[0]) if begins else UNSET,
            stop_when=stop_when,
            **self._envelope,
        )
