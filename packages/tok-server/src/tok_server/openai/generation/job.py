"""GenerationJob: one parsed HTTP request, the limits that it must keep, and its requests to the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import TracebackType

import msgspec

from tok_core import AsyncEngine, Delta, InvalidField, RequestStream, SamplingParams
from tok_server.http import tenant_cache_salt
from tok_server.observability import RequestCounts
from tok_server.openai.generation.stop_when import StopWhenRule
from tok_server.parsing import NO_MARKUP, Markup
from tok_server.settings import MAX_CLIENT_PRIORITY
from tok_server.wire import ApiError, invalid, invalid_field, limited

MAX_LOGPROBS = 1 << 24  # log-probabilities of a whole answer: some 3 GB in memory
MAX_KEPT_LOGPROBS = 1 << 21  # log-probabilities of a background answer, which is kept whole: some 200 MB of JSON
MAX_RESPONSE_LOGPROBS = 1 << 18  # log-probabilities of a response, whose last stream events repeat all of them

PROMPTS_PER_TURN = 64  # prompts submitted before other requests get a turn of the event loop
PROMPT_TOKENS_PER_TURN = 1 << 16  # prompt tokens submitted before other requests get a turn
MAX_WAITING_BATCHES = 16  # batches of deltas, of several prompts, queued for writing: more stay in the engine
MAX_GRAMMAR_CHECKS = 256  # grammars of one tenant that may be compiling or waiting to be compiled


class GenerationJob(msgspec.Struct, frozen=True, kw_only=True):
    """One parsed HTTP request.

    id                  the answer's id; the engine's request ids begin with it
    prompts             token ids of each prompt
    best_of             samples per prompt of which the best params.n are returned; None: all samples are returned
    include_usage       a stream ends with a chunk that carries the usage
    return_token_ids    choices carry their token ids, and those of their prompt
    tokens_as_ids       log-probabilities name tokens by their ids
    continuous_usage    every chunk of a stream carries the usage so far
    echo                completions begin with their prompt
    prompt_logprobs     number of top tokens reported per prompt position; None: no prompt log-probabilities
    markup              markup that a chat's text may hold
    ignored             paths of fields without effect
    default_max_tokens  params.max_tokens is this server's default, which is lowered to fit the model's length
    stop_when           rule that ends the samples of the single prompt early
    cache_salt          requests with different salts share nothing in the prefix cache
    field_names         the engine's name of a field -> this endpoint's name
    """

    id: str
    created: int
    model: str
    prompts: list[list[int]]
    params: SamplingParams
    stream: bool
    include_usage: bool
    return_token_ids: bool
    tokens_as_ids: bool = False
    continuous_usage: bool = False
    best_of: int | None = None
    echo: bool = False
    prompt_logprobs: int | None = None
    markup: Markup = NO_MARKUP
    ignored: tuple[str, ...] = ()
    default_max_tokens: bool = False
    stop_when: StopWhenRule | None = None
    cache_salt: str | None = None
    field_names: Mapping[str, str] = msgspec.field(default_factory=dict)

    @property
    def samples_per_prompt(self) -> int:
        """Return the number of samples generated per prompt."""
        return self.best_of or self.params.n

    def prompt_params(self, prompt: list[int], max_model_len: int) -> SamplingParams:
        """Return the parameters for one prompt. Errors: InvalidField("min_tokens") if it exceeds the tokens left."""
        remaining = max_model_len - len(prompt)
        params = self.params if self.best_of is None else best_of_params(self.params, self.best_of)
        max_tokens = params.max_tokens
        if not self.default_max_tokens or max_tokens is None or not 1 <= remaining < max_tokens:
            return params
        return msgspec.structs.replace(params, max_tokens=remaining)

    def field_error(self, error: InvalidField, prompt: int) -> ApiError:
        """Return the engine's refusal of prompt number `prompt` as ApiError, with this endpoint's field names."""
        name = self.field_names.get(error.field, error.field)
        if error.field == "prompt" and name == "prompt" and len(self.prompts) > 1:
            name = f"prompt[{prompt}]"
        if error.field == "request_id":  # the engine's id has the number of the prompt
            error = InvalidField(name, self.id, error.allowed)
        return invalid_field(error, name)


def best_of_params(params: SamplingParams, count: int) -> SamplingParams:
    """Return the parameters for `count` samples with log-probabilities, by which best_of ranks them.

    Raise InvalidField("n") for an invalid count.
    """
    return msgspec.structs.replace(params, n=count, logprobs=params.logprobs or 0)


def check_limits(
    job: GenerationJob, max_n: int, min_priority: int | None, max_model_len: int, max_logprobs: int | None
) -> None:
    """Raise ApiError (400) if a job exceeds a limit.

    max_n         largest number of samples per prompt
    min_priority  smallest priority that clients may ask for; None: any
    max_logprobs  largest number of log-probabilities of the answer; None: any
    """
    samples, priority, top = job.samples_per_prompt, job.params.priority, job.params.logprobs
    if samples > max_n:
        name = "n" if job.best_of is None else "best_of"
        raise limited("max_n", 400, f"{name} is {samples}; allowed: integers from 1 to {max_n}", param=name)
    if min_priority is not None and not min_priority <= priority <= MAX_CLIENT_PRIORITY:
        message = f"priority is {priority}; allowed: integers from {min_priority} to {MAX_CLIENT_PRIORITY}"
        raise limited("min_client_priority", 400, message, param="priority")
    if top is None or max_logprobs is None:
        return
    max_tokens = max_model_len if job.params.max_tokens is None else job.params.max_tokens
    if len(job.prompts) * samples * max_tokens * (1 + top) > max_logprobs:
        name = job.field_names.get("logprobs", "logprobs")
        factors = f"{len(job.prompts)} × {samples} × {max_tokens} × {1 + top}"
        what = f"prompts × samples × max_tokens × (1 + {name}) is {factors}"
        raise invalid(name, f"{name}: {what}; allowed: at most {max_logprobs} in all", "too_many_logprobs")


class SubmittedStreams:
    """Context manager that submits a job: `async with` gives one stream per prompt. Errors: ApiError, EngineError.

    An exception or a cancellation inside the block aborts all requests. Enter it after `check_grammar`: otherwise an
    invalid grammar is refused in the middle of the stream.

    counts          records what the requests cost
    tenant          owner of the requests
    share_prefixes  whether tenants share cached prefixes
    """

    __slots__ = ("_counts", "_engine", "_job", "_salt", "_streams", "_tenant")

    def __init__(
        self,
        engine: AsyncEngine,
        job: GenerationJob,
        counts: RequestCounts | None = None,
        tenant: str = "",
        *,
        share_prefixes: bool,
    ) -> None:
        self._engine = engine
        self._job = job
        self._counts = counts
        self._tenant = tenant
        self._salt = tenant_cache_salt(tenant, job.cache_salt, share_prefixes=share_prefixes)
        self._streams: list[RequestStream] = []

    async def __aenter__(self) -> list[RequestStream]:
        try:
            tokens = 0
            for index, prompt in enumerate(self._job.prompts):
                self._streams.append(self._submit(index, prompt))
                tokens += len(prompt)
                if index % PROMPTS_PER_TURN == PROMPTS_PER_TURN - 1 or tokens > PROMPT_TOKENS_PER_TURN:
                    tokens = 0
                    await asyncio.sleep(0)
        except BaseException:
            self._finish(failed=True)
            raise
        if self._counts is not None:
            self._counts.submitted(self._streams, self._job.samples_per_prompt)
        return self._streams

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finish(failed=kind is not None)
        if isinstance(error, InvalidField):  # the grammar exceeded its limits in the middle of an answer
            raise self._job.field_error(error, 0) from error

    def _submit(self, index: int, prompt: list[int]) -> RequestStream:
        job, engine = self._job, self._engine
        try:
            return engine.generate(
                prompt,
                job.prompt_params(prompt, engine.info.max_model_len),
                request_id=f"{job.id}-{index}",
                stream=job.stream,
                tenant=self._tenant,
                cache_salt=self._salt,
            )
        except InvalidField as error:
            raise job.field_error(error, index) from error

    def free(self) -> None:
        """Free the log-probabilities in a thread, gradually; the outputs of the requests are unavailable then."""
        if self._job.params.logprobs is not None or self._job.params.prompt_logprobs is not None:
            asyncio.get_running_loop().run_in_executor(None, _free, self._streams)

    def _finish(self, *, failed: bool) -> None:
        if failed:
            for stream in self._streams:
                stream.abort()
            self.free()
        if self._counts is not None:
            self._counts.ended(self._streams)


def _free(streams: Sequence[RequestStream]) -> None:
    for stream in streams:
        stream.free()


async def check_grammar(
    engine: AsyncEngine, job: GenerationJob, max_pending: int | None = None, tenant: str = ""
) -> None:
    """Wait until the job's grammar, if it has one, is known to be usable. Errors: ApiError, EngineError.

    max_pending  EngineError is raised if the grammar is unknown and this many others of the tenant are being compiled
    tenant       owner of the request
    """
    if job.params.grammar is None:
        return
    try:
        await engine.check_grammar(job.params.grammar, most=max_pending, tenant=tenant)
    except InvalidField as error:
        raise job.field_error(error, 0) from error


async def merge_streams(streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, list[Delta]]]:
    """Yield batches of deltas of all streams as they come, each with its stream's number. Raise the first error."""
    queue: asyncio.Queue[tuple[int, list[Delta] | Exception | None]] = asyncio.Queue(MAX_WAITING_BATCHES)
    tasks = [asyncio.create_task(_pump(stream, index, queue)) for index, stream in enumerate(streams)]
    try:
        open_streams = len(tasks)
        while open_streams:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                open_streams -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    stream: RequestStream, index: int, queue: asyncio.Queue[tuple[int, list[Delta] | Exception | None]]
) -> None:
    try:
        async for batch in stream.batches():
            await queue.put((index, batch))
        await queue.put((index, None))
    except Exception as error:
        await queue.put((index, error))
