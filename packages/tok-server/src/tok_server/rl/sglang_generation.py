"""SGLang's endpoint `/generate`: prompts of text or token ids, one or a batch, and its names of sampling parameters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain

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
    TokenTuple,
)
from tok_core import Completion, RequestOutput, TokenLogprob
from tok_server.http import Context
from tok_server.openai import (
    GenerationJob,
    UnsupportedFields,
    clamp_logprob,
    parse_request,
    tokenise_prompts,
    value_or_none,
)
from tok_server.rl.token_jobs import answer, job_of, run_jobs, spans_of
from tok_server.rl.trainer_context import read_fields, trainer_context
from tok_server.wire import Operation, invalid, json_of, new_id

MAX_CHOICES = 65_536  # prompts × samples of a request
OFF = (None, False)
_ABSENT = "is not supported"
UNSUPPORTED = (
    UnsupportedFields({"stream": OFF}, "is not supported: answers are whole"),
    UnsupportedFields({"priority": (None, 0)}, "is not supported: use priority of /inference/v1/generate"),
    UnsupportedFields(
        {"image_data": (None, []), "video_data": (None, []), "audio_data": (None, []), "input_embeds": (None,)},
        "is not supported: use text or input_ids",
    ),
    UnsupportedFields({"lora_path": (None,), "lora_id": (None,)}, "is not supported: the server has no adapters"),
    UnsupportedFields({"token_ids_logprob": (None, []), "return_text_in_logprobs": OFF}, _ABSENT),
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
"""SGLang's name of a sampling parameter -> that of /v1/completions, where they differ."""
GRAMMARS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}  # -> the field of `structured_outputs`
ERROR_NAMES = {ours: theirs for theirs, ours in COMPLETION_NAMES.items()}
ERROR_NAMES |= {f"structured_outputs.{ours}": theirs for theirs, ours in GRAMMARS.items()}
ERROR_NAMES |= {"logprobs": "top_logprobs_num", "prompt_logprobs": "top_logprobs_num"}


class _Prompt(msgspec.Struct):
    """One prompt of a request: its job, and the position from which on its log-probabilities are reported."""

    rid: str
    job: GenerationJob
    first: int | None
    top: int


async def generate(request: web.Request) -> web.Response:
    """Return samples of one prompt or of several, with token ids and log-probabilities."""
    context = trainer_context(request)
    fields, headers = await read_fields(request, context, SGLangRequest, UNSUPPORTED)
    prompts, batch = await context.run_in_thread(partial(_parse, fields, context))
    outputs = await run_jobs(request, context, [one.job for one in prompts])
    body = await context.run_in_thread(partial(_encode, prompts, outputs, batch))
    return answer(context, body, [one.job for one in prompts], headers)


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
    if not given or len({type(one) for one in given}) > 1:
        raise invalid(name, f"{name} is empty or mixes kinds; allowed: one prompt, or a list of prompts")
    ids = tokenise_prompts(listed, engine, name)  # type: ignore[arg-type]
    count = len(ids)
    rid = value_or_none(fields.rid) or new_id("gen")
    rids = [f"{rid}_{i}" for i in range(count)] if batch and isinstance(rid, str) else _each("rid", rid, count, str)
    columns = zip(
        ids,
        rids,
        _each("sampling_params", value_or_none(fields.sampling_params) or {}, count, dict),
        _each("return_logprob", value_or_none(fields.return_logprob) or False, count, bool),
        _each("logprob_start_len", _or_default(fields.logprob_start_len, -1), count, int),
        _each("top_logprobs_num", _or_default(fields.top_logprobs_num, 0), count, int),
        _each("extra_key", value_or_none(fields.extra_key), count, str),
        _each("cache_salt", value_or_none(fields.cache_salt), count, str),
        strict=True,
    )
    prompts = []
    for prompt, one_rid, params, reports, start, top, key, salt in columns:
        if not -1 <= start <= len(prompt):
            message = f"logprob_start_len is {start}; allowed: integers from -1 to the prompt's length ({len(prompt)})"
            raise invalid("logprob_start_len", message)
        first = start if reports and 0 <= start < len(prompt) else None
        own, ignored = _completion_fields(params, engine.info.max_model_len)
        if reports:
            own["logprobs"] = top
        if first is not None:
            own["prompt_logprobs"] = top
        if key is not None or salt is not None:
            own["cache_salt"] = "\n".join(one for one in (salt, key) if one is not None)
        job = job_of(own, prompt, name, engine, ERROR_NAMES)
        job = msgspec.structs.replace(job, id=one_rid, default_max_tokens=True, ignored=ignored)
        prompts.append(_Prompt(one_rid, job, first, top if reports else 0))
    if sum(one.job.params.n for one in prompts) > MAX_CHOICES:
        raise invalid("n", f"n: prompts × n; allowed: at most {MAX_CHOICES} in all")
    return prompts, batch or any(one.job.params.n > 1 for one in prompts)


def _or_default(value: Maybe[int | list[int]], default: int) -> int | list[int]:
    return default if value is UNSET or value is None else value


def _each(name: str, value: object, count: int, kind: type) -> Sequence[object]:
    """Return the field's value for each prompt: a list has one for each, any other value holds for all."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count or not all(isinstance(one, kind) for one in value):
        raise invalid(name, f"{name} has {len(value)} values; allowed: one, or one for each of {count} prompts")
    return value


def _completion_fields(params: JSONObject, max_model_len: int) -> tuple[dict[str, object], tuple[str, ...]]:
    """Return sampling parameters of SGLang as fields of /v1/completions, and the names of those without effect.

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


def _generation(prompt: _Prompt, output: RequestOutput, sample: Completion) -> SGLangGeneration:
    timings = output.timings
    info = SGLangMetaInfo(
        id=prompt.rid,
        finish_reason=_finish_reason(sample),
        prompt_tokens=len(output.prompt_token_ids),
        completion_tokens=len(sample.token_ids),
        cached_tokens=output.cached_tokens,
        weight_version=sample.weight_version,
        e2e_latency=(timings.finished or timings.submitted) - timings.submitted,
        weight_spans=spans_of(sample),
    )
    if sample.logprobs is not None:
        before = (output.prompt_logprobs or [])[prompt.first :] if prompt.first is not None else []
        ids = output.prompt_token_ids[len(output.prompt_token_ids) - len(before) :]
        info = msgspec.structs.replace(
            info,
            input_token_logprobs=[_token(one, token) for one, token in zip(before, ids, strict=True)],
            output_token_logprobs=[_token(one, one.token_id) for one in sample.logprobs],
            input_top_logprobs=[None if one is None else _top(one, prompt.top) for one in before]
            if prompt.top
            else UNSET,
            output_top_logprobs=[_top(one, prompt.top) for one in sample.logprobs] if prompt.top else UNSET,
        )
    return SGLangGeneration(text=sample.text, output_ids=sample.token_ids, meta_info=info)


def _token(entry: TokenLogprob | None, token: int) -> TokenTuple:
    return (None if entry is None else clamp_logprob(entry.logprob), token, None)


def _top(entry: TokenLogprob, count: int) -> list[TokenTuple]:
    return [(clamp_logprob(logprob), token, None) for token, logprob in entry.top[:count]]


def _finish_reason(sample: Completion) -> SGLangFinishReason:
    match sample.finish_reason:
        case "length":
            return SGLangFinishReason(type="length", length=len(sample.token_ids))
        case "abort":
            return SGLangFinishReason(type="abort", message="the request was aborted")
        case _:
            matched = sample.stop_reason if sample.stop_reason is not None else sample.token_ids[-1]
            return SGLangFinishReason(type="stop", matched=matched)


SGLANG_GENERATION = (
    Operation(
        "POST",
        "/generate",
        generate,
        request=json_of(SGLangRequest),
        answers={200: json_of(SGLangGeneration | list[SGLangGeneration])},
    ),
)
