"""/v1/chat/completions: the assistant's next message in a conversation."""

from __future__ import annotations

import time

from aiohttp import web

from tok_client.types import (
    UNSET,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatLogprobs,
    ChatMessage,
    ChunkChoice,
    Maybe,
    Usage,
)
from tok_client.types import Delta as MessageDelta
from tok_core import AsyncEngine, Delta, InvalidField, RequestOutput, TokenLogprob
from tok_server.answer import answer, event
from tok_server.body import read_body
from tok_server.context import CONTEXT
from tok_server.errors import invalid
from tok_server.ids import fingerprint, new_id
from tok_server.job import Job
from tok_server.logprobs import TokenTexts, chat_logprobs
from tok_server.messages import template_messages
from tok_server.params import given, sampling_params
from tok_server.prompt_size import check_size
from tok_server.reading import check_model, read, wants_usage
from tok_server.unsupported import CHAT
from tok_server.usage import usage
from tok_server.wire import encode


async def create(request: web.Request) -> web.StreamResponse:
    """Handler of POST /v1/chat/completions."""
    context = request.app[CONTEXT]
    context.admit()
    body = await read_body(request, context.settings.body_timeout)
    job = await context.work(lambda: parse(body, context.engine, context.settings.model_name))
    return await answer(request, context, job, ChatForm(job, TokenTexts(context.engine.tokenizer)))


def parse(body: bytes, engine: AsyncEngine, model: str) -> Job:
    """The body as a Job, messages as token ids. Slow for long prompts. Errors: ApiError."""
    request, ignored = read(body, ChatCompletionRequest, CHAT)
    check_model(given(request.model), model)
    newer = given(request.max_completion_tokens) is not None
    names = {
        "prompt": "messages",
        "logprobs": "top_logprobs",
        "max_tokens": "max_completion_tokens" if newer else "max_tokens",
    }
    params = sampling_params(
        request,
        max_tokens=_max_tokens(request),
        logprobs=_top_logprobs(request),
        vocab_size=engine.info.vocab_size,
        names=names,
    )
    return Job(
        id=new_id("chatcmpl"),
        created=int(time.time()),
        model=model,
        prompts=[_prompt(request, engine)],
        params=params,
        stream=bool(given(request.stream)),
        include_usage=wants_usage(request),
        return_token_ids=bool(given(request.return_token_ids)),
        ignored=ignored,
        names=names,
    )


def _max_tokens(request: ChatCompletionRequest) -> int | None:
    """None: up to the model's length."""
    older, newer = given(request.max_tokens), given(request.max_completion_tokens)
    if older is not None and newer is not None and older != newer:
        message = f"max_tokens is {older} and max_completion_tokens is {newer}; allowed: one of them"
        raise invalid("max_tokens", message)
    return older if newer is None else newer


def _top_logprobs(request: ChatCompletionRequest) -> int | None:
    top = given(request.top_logprobs)
    if given(request.logprobs):
        return top or 0
    if top is not None:
        raise invalid("top_logprobs", "top_logprobs is only allowed together with logprobs=true")
    return None


def _prompt(request: ChatCompletionRequest, engine: AsyncEngine) -> list[int]:
    messages = template_messages(request.messages)
    if engine.tokenizer is None or engine.chat_template is None:
        raise invalid("messages", "the model has no chat template; /v1/completions takes plain prompts")
    try:
        text = engine.chat_template.render(messages)
        check_size(text, engine.tokenizer, engine.info.max_model_len, "messages")
        # The template has put the special tokens in its text already.
        return engine.tokenizer.encode(text, add_special_tokens=False)
    except InvalidField as error:
        raise invalid("messages", str(error)) from error


class ChatForm:
    """The JSON of one answer. A streamed choice begins with its role and ends with an empty delta."""

    def __init__(self, job: Job, texts: TokenTexts) -> None:
        self._job = job
        self._texts = texts
        self._begun: set[int] = set()

    def whole(self, outputs: list[RequestOutput]) -> bytes:
        """The answer of the one finished request."""
        choices = [
            ChatChoice(
                index=one.index,
                message=ChatMessage(content=one.text),
                logprobs=self._logprobs(one.logprobs),
                finish_reason=one.finish_reason,
                token_ids=one.token_ids if self._job.return_token_ids else UNSET,
            )
            for one in outputs[0].outputs
        ]
        tokens = sum(len(one.token_ids) for one in outputs[0].outputs)
        return encode(
            ChatCompletion(
                id=self._job.id,
                created=self._job.created,
                model=self._job.model,
                choices=choices,
                usage=usage(outputs, tokens),
                system_fingerprint=fingerprint(),
            )
        )

    def events(self, prompt: int, delta: Delta) -> bytes:
        """Up to three chunks: the role, what was gained, the reason of the end."""
        index = delta.index
        parts = []
        if index not in self._begun:
            self._begun.add(index)
            parts.append(ChunkChoice(index=index, delta=MessageDelta(role="assistant", content="")))
        if delta.text or delta.logprobs or (self._job.return_token_ids and delta.token_ids):
            parts.append(self._gain(delta))
        if delta.finish_reason:
            parts.append(ChunkChoice(index=index, delta=MessageDelta(), finish_reason=delta.finish_reason))
        used = None if self._job.include_usage else UNSET
        return b"".join(event(encode(self._chunk([part], used))) for part in parts)

    def closing(self, used: Usage) -> bytes:
        """The chunk without choices."""
        return event(encode(self._chunk([], used)))

    def _gain(self, delta: Delta) -> ChunkChoice:
        return ChunkChoice(
            index=delta.index,
            delta=MessageDelta(content=delta.text),
            logprobs=self._logprobs(delta.logprobs),
            token_ids=delta.token_ids if self._job.return_token_ids else UNSET,
        )

    def _logprobs(self, entries: list[TokenLogprob] | None) -> ChatLogprobs | None:
        if entries is None or self._job.params.logprobs is None:
            return None
        return chat_logprobs(entries, self._texts)

    def _chunk(self, choices: list[ChunkChoice], used: Maybe[Usage]) -> ChatCompletionChunk:
        job = self._job
        return ChatCompletionChunk(
            id=job.id,
            created=job.created,
            model=job.model,
            choices=choices,
            usage=used,
            system_fingerprint=fingerprint(),
        )
