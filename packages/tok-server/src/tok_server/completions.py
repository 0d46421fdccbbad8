"""/v1/completions: text that continues a prompt."""

from __future__ import annotations

import re
import time
from collections import defaultdict

from aiohttp import web

from tok_client.types import (
    UNSET,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    Maybe,
    Usage,
)
from tok_core import AsyncEngine, Delta, InvalidField, RequestOutput, TokenLogprob
from tok_server.answer import answer, event
from tok_server.body import read_body
from tok_server.context import CONTEXT
from tok_server.errors import invalid
from tok_server.ids import fingerprint, new_id
from tok_server.job import Job
from tok_server.logprobs import Offsets, TokenTexts, completion_logprobs
from tok_server.params import given, sampling_params
from tok_server.prompt_size import check_size
from tok_server.reading import check_model, read, wants_usage
from tok_server.unsupported import COMPLETION
from tok_server.usage import usage
from tok_server.wire import encode

MAX_TOKENS = 16  # OpenAI's default; fewer where the model's length leaves no room
MAX_CHOICES = 65_536
SHORT = 8192  # bytes: some thousand token ids
TOKEN_IDS = re.compile(rb'"prompt"\s*:\s*\[[\s\[]*\d')


async def create(request: web.Request) -> web.StreamResponse:
    """Handler of POST /v1/completions."""
    context = request.app[CONTEXT]
    context.admit()
    body = await read_body(request, context.settings.body_timeout)
    # Text needs the tokenizer, which takes its time and leaves the interpreter to others meanwhile.
    short = len(body) <= SHORT and TOKEN_IDS.search(body) is not None
    job = await context.work(lambda: parse(body, context.engine, context.settings.model_name), short=short)
    return await answer(request, context, job, CompletionForm(job, TokenTexts(context.engine.tokenizer)))


def parse(body: bytes, engine: AsyncEngine, model: str) -> Job:
    """The body as a Job, prompts as token ids. Slow for long prompts. Errors: ApiError."""
    request, ignored = read(body, CompletionRequest, COMPLETION)
    check_model(given(request.model), model)
    max_tokens = given(request.max_tokens)
    params = sampling_params(
        request,
        max_tokens=MAX_TOKENS if max_tokens is None else max_tokens,
        logprobs=given(request.logprobs),
        vocab_size=engine.info.vocab_size,
        names={},
    )
    best_of = given(request.best_of)
    if best_of is not None and best_of != params.n:
        message = f"best_of is {best_of}; allowed: n ({params.n}); more than n samples are not supported yet"
        raise invalid("best_of", message, "unsupported_parameter")
    return Job(
        id=new_id("cmpl"),
        created=int(time.time()),
        model=model,
        prompts=_prompts(request, params.n, engine),
        params=params,
        stream=bool(given(request.stream)),
        include_usage=wants_usage(request),
        return_token_ids=bool(given(request.return_token_ids)),
        ignored=ignored,
        default_length=max_tokens is None,
    )


def _prompts(request: CompletionRequest, n: int, engine: AsyncEngine) -> list[list[int]]:
    prompts = request.prompts()
    if len(prompts) * n > MAX_CHOICES:
        allowed = f"at most {MAX_CHOICES} choices (prompts × n)"
        raise invalid("prompt", f"prompt holds {len(prompts)} prompts, n is {n}; allowed: {allowed}")
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if not texts:
        return [prompt for prompt in prompts if isinstance(prompt, list)]
    if engine.tokenizer is None:
        raise invalid("prompt", "prompt is text, but the model has no tokenizer; allowed: token ids")
    try:
        for index, text in enumerate(texts):
            field = "prompt" if len(texts) == 1 else f"prompt[{index}]"
            check_size(text, engine.tokenizer, engine.info.max_model_len, field)
        return engine.tokenizer.encode_batch(texts)
    except InvalidField as error:
        raise invalid("prompt", str(error)) from error


class CompletionForm:
    """The JSON of one answer. Choice number: prompt × n + sample."""

    def __init__(self, job: Job, texts: TokenTexts) -> None:
        self._job = job
        self._texts = texts
        self._offsets: defaultdict[int, Offsets] = defaultdict(Offsets)

    def whole(self, outputs: list[RequestOutput]) -> bytes:
        """The answer of finished requests, one a prompt."""
        choices = [
            self._choice(prompt, one.index, one.text, one.token_ids, one.logprobs, one.finish_reason)
            for prompt, output in enumerate(outputs)
            for one in output.outputs
        ]
        tokens = sum(len(one.token_ids) for output in outputs for one in output.outputs)
        return encode(self._object(choices, usage(outputs, tokens)))

    def events(self, prompt: int, delta: Delta) -> bytes:
        """One chunk."""
        ids = delta.token_ids if self._job.return_token_ids else None
        if not (delta.text or delta.finish_reason or delta.logprobs or ids):
            return b""
        choice = self._choice(prompt, delta.index, delta.text, delta.token_ids, delta.logprobs, delta.finish_reason)
        return event(encode(self._object([choice], None if self._job.include_usage else UNSET)))

    def closing(self, used: Usage) -> bytes:
        """The chunk without choices."""
        return event(encode(self._object([], used)))

    def _choice(
        self,
        prompt: int,
        sample: int,
        text: str,
        token_ids: list[int],
        logprobs: list[TokenLogprob] | None,
        finish_reason: str | None,
    ) -> CompletionChoice:
        index = prompt * self._job.params.n + sample
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=self._logprobs(index, logprobs),
            finish_reason=finish_reason,
            token_ids=token_ids if self._job.return_token_ids else UNSET,
        )

    def _logprobs(self, index: int, entries: list[TokenLogprob] | None) -> CompletionLogprobs | None:
        if entries is None or self._job.params.logprobs is None:
            return None
        return completion_logprobs(entries, self._texts, self._offsets[index])

    def _object(self, choices: list[CompletionChoice], used: Maybe[Usage]) -> Completion:
        job = self._job
        return Completion(
            id=job.id,
            created=job.created,
            model=job.model,
            choices=choices,
            usage=used,
            system_fingerprint=fingerprint(),
        )
