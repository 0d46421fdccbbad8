"""SGLang's endpoint `/generate`: one prompt or a batch, as text or token ids, with SGLang's sampling parameters."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, chain
from typing import Protocol

import msgspec
from aiohttp import web

from tok_client.types import (
    UNSET,
    JSONObject,
    Maybe,
    SGLangFinishReason,
    SGLangGeneration,
    SGLangMetaInfo,
    SGLangRequest,
    SGLangSamplingParams,
    StopWhenResult,
    TokenTuple,
    Usage,
)
from tok_core import Completion, Delta, RequestOutput, RequestStream, Timings, TokenLogprob
from tok_server.http import Context
from tok_server.openai import (
    DONE,
    MAX_RESPONSE_LOGPROBS,
    GenerationJob,
    TokenTexts,
    UnsupportedFields,
    clamp_logprob,
    event,
    parse_request,
    tokenise_prompts,
    value_or_none,
)
from tok_server.rl.token_jobs import answer, make_job, run_jobs, stream_jobs, weight_fields
from tok_server.rl.trainer_context import read_fields, trainer_context
from tok_server.wire import ApiError, encode, fill_lists, invalid, json_post, new_id

MAX_CHOICES = 65_536  # prompts × samples of a request
OFF = (None, False)
_ABSENT = "is not supported"
UNSUPPORTED = (
    UnsupportedFields({"priority": (None, 0)}, "is not supported: use priority of /inference/v1/generate"),
    UnsupportedFields(
        {"image_data": (None, []), "video_data": (None, []), "audio_data": (None, []), "input_embeds": (None,)},
        "is not supported: use text or input_ids",
    ),
    UnsupportedFields({"lora_path": (None,), "lora_id": (None,)}, "is not supported: the server has no adapters"),
    UnsupportedFields({"token_ids_logprob": (None, [])}, _ABSENT),
    UnsupportedFields({"return_hidden_states": OFF, "return_routed_experts": OFF, "return_entropy": OFF}, _ABSENT),
    UnsupportedFields({"return_sampling_mask": OFF, "return_flat_raw_top_logprobs": OFF}, _ABSENT),
    UnsupportedFields({"session_params": (None,), "custom_logit_processor": (None,)}, _ABSENT),
    UnsupportedFields({"max_thinking_tokens": (None,), "positional_embed_overrides": (None,)}, _ABSENT),
)
UNSUPPORTED_PARAMS = (
    UnsupportedFields({"stop_regex": (None, [])}, "is not supported: use stop"),
    UnsupportedFields({"structural_tag": (None,)}, "is not supported: use json_schema, regex or ebnf"),
    UnsupportedFields({"custom_params": (None, {})}, _ABSENT),
)
COMPLETION_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "sampling_seed": "seed",
}
"""SGLang's name of a sampling parameter -> the name in /v1/completions, where they differ."""
GRAMMARS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}
"""SGLang's name of a grammar -> the field of `structured_outputs` in /v1/completions."""
ERROR_NAMES = {ours: theirs for theirs, ours in COMPLETION_NAMES.items()}
ERROR_NAMES |= {f"structured_outputs.{ours}": theirs for theirs, ours in GRAMMARS.items()}
ERROR_NAMES |= {"logprobs": "top_logprobs_num", "prompt_logprobs": "top_logprobs_num", "request_id": "rid"}
LISTS = ("output_ids", "input_token_logprobs", "output_token_logprobs", "input_top_logprobs", "output_top_logprobs")
"""Lists of an answer, in the order of its JSON."""


class _Prompt(msgspec.Struct):
    """One prompt of a request.

    first  first position whose prompt log-probability is reported; None: none is
    top    number of top log-probabilities reported at each position
    texts  texts of tokens, if log-probabilities contain them
    """

    rid: str
    job: GenerationJob
    first: int | None
    top: int
    texts: TokenTexts | None = None

    def token(self, entry: TokenLogprob | None, token: int) -> TokenTuple:
        """Return a token with its log-probability."""
        return self._tuple(None if entry is None else entry.logprob, token)

    def top_tokens(self, entry: TokenLogprob) -> list[TokenTuple]:
        """Return the most likely tokens of a position."""
        return [self._tuple(logprob, token) for token, logprob in entry.top[: self.top]]

    def _tuple(self, logprob: float | None, token: int) -> TokenTuple:
        text = None if self.texts is None else self.texts.piece(token).decode(errors="replace")
        return (None if logprob is None else clamp_logprob(logprob), token, text)


async def generate(request: web.Request) -> web.StreamResponse:
    """Return samples of one or several prompts, with token ids and log-probabilities, as a whole or streamed."""
    context = trainer_context(request)
    fields, headers = await read_fields(request, context, SGLangRequest, UNSUPPORTED)
    prompts, batch = await context.run_in_thread(partial(_parse, fields, context))
    jobs = [prompt.job for prompt in prompts]
    if value_or_none(fields.stream):
        jobs = [msgspec.structs.replace(job, stream=True) for job in jobs]
        events = partial(_Events, prompts, batch)
        return await stream_jobs(request, context, jobs, events, headers, MAX_RESPONSE_LOGPROBS)
    outputs = await run_jobs(request, context, jobs)
    body = await context.run_in_thread(partial(_encode, prompts, outputs, batch))
    return answer(context, body, jobs, headers)


def _parse(fields: SGLangRequest, context: Context) -> tuple[list[_Prompt], bool]:
    """Return the prompts, and whether the request is a batch, whose answer is a list. Errors: ApiError."""
    engine = context.engine
    text, input_ids = value_or_none(fields.text), value_or_none(fields.input_ids)
    if (text is None) == (input_ids is None):
        message = "text and input_ids: exactly one of them is allowed"
        raise invalid("input_ids", message)
    name = "text" if input_ids is None else "input_ids"
    given = text if input_ids is None else input_ids
    batch = isinstance(given, list) and not (input_ids and isinstance(input_ids[0], int))
    listed = given if batch else [given]
    if not given or len({type(entry) for entry in given}) > 1:
        raise invalid(name, f"{name} is empty or mixes kinds; allowed: one prompt, or a list of prompts")
    ids = tokenise_prompts(listed, engine, name)  # type: ignore[arg-type]
    count = len(ids)
    rid = value_or_none(fields.rid) or new_id("gen")
    rids = (
        [f"{rid}_{i}" for i in range(count)] if batch and isinstance(rid, str) else _per_prompt("rid", rid, count, str)
    )
    columns = zip(
        ids,
        rids,
        _per_prompt("sampling_params", value_or_none(fields.sampling_params) or {}, count, dict),
        _per_prompt("return_logprob", value_or_none(fields.return_logprob) or False, count, bool),
        _per_prompt("logprob_start_len", _or_default(fields.logprob_start_len, -1), count, int),
        _per_prompt("top_logprobs_num", _or_default(fields.top_logprobs_num, 0), count, int),
        _per_prompt("extra_key", value_or_none(fields.extra_key), count, str),
        _per_prompt("cache_salt", value_or_none(fields.cache_salt), count, str),
        strict=True,
    )
    prompts = []
    for prompt, prompt_rid, params, logprobs, start, top, key, salt in columns:
        if not -1 <= start <= len(prompt):
            message = f"logprob_start_len is {start}; allowed: integers from -1 to the prompt's length ({len(prompt)})"
            raise invalid("logprob_start_len", message)
        first = start if logprobs and 0 <= start < len(prompt) else None
        completion, ignored = _completion_fields(params, engine.info.max_model_len)
        if logprobs:
            completion["logprobs"] = top
        if first is not None:
            completion["prompt_logprobs"] = top
        elif completion["max_tokens"] == 0:  # only caches the prompt: the engine requires prompt log-probabilities then
            completion["prompt_logprobs"] = 0
        if key is not None or salt is not None:
            completion["cache_salt"] = "\n".join(part for part in (salt, key) if part is not None)
        job = make_job(completion, prompt, name, engine, ERROR_NAMES)
        job = msgspec.structs.replace(job, id=prompt_rid, default_max_tokens=True, ignored=ignored)
        texts = TokenTexts.of(engine.tokenizer, job) if value_or_none(fields.return_text_in_logprobs) else None
        prompts.append(_Prompt(prompt_rid, job, first, top if logprobs else 0, texts))
    if sum(prompt.job.params.n for prompt in prompts) > MAX_CHOICES:
        raise invalid("n", f"n: prompts × n; allowed: at most {MAX_CHOICES} in all")
    return prompts, batch or any(prompt.job.params.n > 1 for prompt in prompts)


def _or_default(value: Maybe[int | list[int]], default: int) -> int | list[int]:
    return default if value is UNSET or value is None else value


def _per_prompt(name: str, value: object, count: int, kind: type) -> Sequence[object]:
    """Return the field's value for each prompt: the entries of a list, or the same value for all prompts."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count or not all(isinstance(entry, kind) for entry in value):
        raise invalid(name, f"{name} has {len(value)} values; allowed: one, or one for each of {count} prompts")
    return value


def _completion_fields(params: JSONObject, max_model_len: int) -> tuple[dict[str, object], tuple[str, ...]]:
    """Return SGLang's sampling parameters as fields of /v1/completions, and the names of parameters without effect.

    Errors: ApiError.
    """
    parsed, ignored = parse_request(msgspec.json.encode(params), SGLangSamplingParams, UNSUPPORTED_PARAMS)
    fields: dict[str, object] = {}
    for name, value in msgspec.structs.asdict(parsed).items():
        if value is not None and name not in GRAMMARS:
            fields[COMPLETION_NAMES.get(name, name)] = value
    if parsed.max_new_tokens is None:
        fields["max_tokens"] = max_model_len
    for name, ours in GRAMMARS.items():
        if (value := getattr(parsed, name)) is not None:
            if "structured_outputs" in fields:
                raise invalid(name, f"{name}: allowed is one of {', '.join(GRAMMARS)}")
            fields["structured_outputs"] = {ours: value}
    return fields, ignored


def _encode(prompts: Sequence[_Prompt], outputs: Sequence[RequestOutput], batch: bool) -> bytes:
    answers = list(
        chain.from_iterable(
            [_generation(prompt, output, sample) for sample in output.outputs]
            for prompt, output in zip(prompts, outputs, strict=True)
        )
    )
    return msgspec.json.encode(answers if batch else answers[0])


class _Request(Protocol):
    """A finished or streaming request."""

    @property
    def prompt_token_ids(self) -> list[int]: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def timings(self) -> Timings: ...
    @property
    def prompt_logprobs(self) -> list[TokenLogprob | None] | None: ...


def _generation(prompt: _Prompt, output: RequestOutput, sample: Completion) -> SGLangGeneration:
    reason = _finish_reason(sample.finish_reason, sample.stop_reason, len(sample.token_ids), sample.token_ids[-1:])
    weights = sample.weight_version, sample.weight_spans
    info = _meta_info(prompt, output, reason, len(sample.token_ids), weights)
    if sample.logprobs is not None:
        of_prompt, top_of_prompt = _prompt_logprobs(prompt, output)
        info = msgspec.structs.replace(
            info,
            input_token_logprobs=of_prompt,
            output_token_logprobs=[prompt.token(entry, entry.token_id) for entry in sample.logprobs],
            input_top_logprobs=top_of_prompt,
            output_top_logprobs=[prompt.top_tokens(entry) for entry in sample.logprobs] if prompt.top else UNSET,
        )
    return SGLangGeneration(text=sample.text, output_ids=sample.token_ids, meta_info=info)


def _meta_info(
    prompt: _Prompt,
    request: _Request,
    finish_reason: SGLangFinishReason | None,
    tokens: int,
    weights: tuple[str, list[tuple[str, int]] | None],
) -> SGLangMetaInfo:
    timings = request.timings
    return SGLangMetaInfo(
        id=prompt.rid,
        finish_reason=finish_reason,
        prompt_tokens=len(request.prompt_token_ids),
        completion_tokens=tokens,
        cached_tokens=request.cached_tokens,
        e2e_latency=(timings.finished or time.monotonic()) - timings.submitted,
        **weight_fields(weights, tokens),
    )


def _prompt_logprobs(
    prompt: _Prompt, request: _Request
) -> tuple[list[TokenTuple], list[list[TokenTuple] | None] | msgspec.UnsetType]:
    """Return the prompt's log-probabilities from the requested position on, and the top log-probabilities there."""
    entries = (request.prompt_logprobs or [])[prompt.first :] if prompt.first is not None else []
    ids = request.prompt_token_ids[len(request.prompt_token_ids) - len(entries) :]
    tokens = [prompt.token(entry, token) for entry, token in zip(entries, ids, strict=True)]
    if not prompt.top:
        return tokens, UNSET
    return tokens, [None if entry is None else prompt.top_tokens(entry) for entry in entries]


def _finish_reason(reason: str, stop_reason: int | str | None, tokens: int, last: Sequence[int]) -> SGLangFinishReason:
    """Return why a sample ended. `last`: its last tokens."""
    match reason:
        case "length":
            return SGLangFinishReason(type="length", length=tokens)
        case "abort":
            return SGLangFinishReason(type="abort", message="the request was aborted")
        case _:
            return SGLangFinishReason(type="stop", matched=stop_reason if stop_reason is not None else last[-1])


class _SampleJson:
    """A streamed sample so far. Its lists are stored as JSON, since every event repeats them."""

    def __init__(self) -> None:
        self.text = ""
        self.tokens = 0
        self.last: list[int] = []  # its latest tokens
        self.lists: dict[str, bytearray] = {}

    def extend(self, name: str, values: Sequence[object]) -> None:
        """Append values to a list."""
        if values:
            elements = self.lists.setdefault(name, bytearray())
            elements += (b"," if elements else b"") + encode(values)[1:-1]


class _Events:
    """Serializer of a stream's events; an event holds a whole sample so far."""

    max_logprobs: int | None = MAX_RESPONSE_LOGPROBS

    def __init__(self, prompts: Sequence[_Prompt], batch: bool, streams: Sequence[RequestStream]) -> None:
        self._prompts = prompts
        self._streams = streams
        self._samples: dict[int, _SampleJson] = {}
        firsts = [0, *accumulate(prompt.job.params.n for prompt in prompts)]
        self._indices: Sequence[int] | None = firsts if batch else None  # of each prompt's first sample

    def encode_opening(self) -> bytes:
        """Return no events: samples begin with their first token."""
        return b""

    def encode_delta(self, number: int, delta: Delta) -> bytes:
        """Add a delta to its sample of prompt `number`, and encode the sample."""
        prompt, request = self._prompts[number], self._streams[number]
        index = delta.index if self._indices is None else self._indices[number] + delta.index
        if (sample := self._samples.get(index)) is None:
            sample = self._samples[index] = self._new_sample(prompt, request)
        sample.text += delta.text
        sample.tokens += len(delta.token_ids)
        sample.last = delta.token_ids or sample.last
        sample.extend("output_ids", delta.token_ids)
        if delta.logprobs is not None:
            sample.extend("output_token_logprobs", [prompt.token(entry, entry.token_id) for entry in delta.logprobs])
            if prompt.top:
                sample.extend("output_top_logprobs", [prompt.top_tokens(entry) for entry in delta.logprobs])
        reason = None
        if delta.finish_reason is not None:
            reason = _finish_reason(delta.finish_reason, delta.stop_reason, sample.tokens, sample.last)
            del self._samples[index]
        elif not (delta.text or delta.token_ids):
            return b""
        info = _meta_info(prompt, request, reason, sample.tokens, request.weights_of(delta.index, sample.tokens))
        if prompt.job.params.logprobs is not None:
            empty: Maybe[list[object]] = [] if prompt.top else UNSET
            info = msgspec.structs.replace(
                info,
                input_token_logprobs=[],
                output_token_logprobs=[],
                input_top_logprobs=empty,
                output_top_logprobs=empty,
            )
        shown = UNSET if self._indices is None else index
        envelope = encode(SGLangGeneration(text=sample.text, output_ids=[], meta_info=info, index=shown))
        lists = [(name, (bytes(sample.lists[name]),)) for name in LISTS if name in sample.lists]
        return event(b"".join(fill_lists(envelope, lists)))

    def encode_closing(self, token_usage: Usage, stop_when: StopWhenResult | None) -> bytes:
        """Encode the end mark."""
        return DONE

    def encode_failure(self, failure: ApiError) -> bytes:
        """Encode the error in place of a sample, and the end mark."""
        return event(failure.body()) + DONE

    def _new_sample(self, prompt: _Prompt, request: RequestStream) -> _SampleJson:
        """Return a sample without tokens, with its prompt's log-probabilities if they are requested."""
        sample = _SampleJson()
        if prompt.job.params.logprobs is not None:
            of_prompt, top_of_prompt = _prompt_logprobs(prompt, request)
            sample.extend("input_token_logprobs", of_prompt)
            sample.extend("input_top_logprobs", top_of_prompt or ())
        return sample


SGLANG_GENERATION = (
    json_post("/generate", generate, SGLangRequest, SGLangGeneration | list[SGLangGeneration], streamed=True),
)
