"""GenerationJob: one parsed HTTP request, ready for the engine, and the limits that it must keep."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tok_core import InvalidField, SamplingParams
from tok_server.openai.generation.stop_when import StopWhenRule
from tok_server.parsing import NO_MARKUP, Markup
from tok_server.settings import MAX_CLIENT_PRIORITY
from tok_server.wire import ApiError, invalid, invalid_field, limited

MAX_LOGPROBS = 1 << 24  # log-probabilities of a whole answer: some 3 GB in memory
MAX_KEPT_LOGPROBS = 1 << 21  # log-probabilities of a background answer, which is kept whole: some 200 MB of JSON
MAX_RESPONSE_LOGPROBS = 1 << 18  # log-probabilities of a response, whose last stream events repeat all of them


class GenerationJob(msgspec.Struct, frozen=True, kw_only=True):
    """One parsed HTTP request.

    id                  the answer's id; the engine's request ids begin with it
    prompts             token ids of each prompt
    best_of             samples per prompt of which the best params.n are returned; None: all samples are returned
    include_usage       a stream ends with a chunk that carries the usage
    return_token_ids    choices carry their token ids
    continuous_usage    every chunk of a stream carries the usage so far
    echo                completions begin with their prompt
    prompt_logprobs     number of top tokens reported per prompt position; None: no prompt log-probabilities
    markup              markup that a chat's text may hold
    ignored             paths of unknown fields
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
