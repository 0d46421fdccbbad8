"""Convert a request's fields to the engine's SamplingParams, and its required format to a grammar."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple, TypeVar, cast

import msgspec

from tok_client.types import (
    UNSET,
    ChatCompletionRequest,
    CompletionRequest,
    JSONObject,
    JsonObjectFormat,
    JsonSchemaFormat,
    Maybe,
    ResponseFormat,
    StructuredOutputs,
)
from tok_core import InvalidField, SamplingParams
from tok_core.messages import EngineInfo
from tok_core.sampling_params import Grammar, Kind
from tok_server.wire import invalid, invalid_field

T = TypeVar("T")
Request = CompletionRequest | ChatCompletionRequest

# Fields with the same name and meaning on the wire and in the engine.
SHARED_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "truncate_prompt_tokens",
    "priority",
)
_get_shared_fields = attrgetter(*SHARED_FIELDS)

GUIDED: Mapping[str, Kind] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf",
    "json_object": "json_object",
}
"""Name in `structured_outputs`, and after `guided_` -> the engine's kind of grammar."""
GUIDED_FIELDS: Mapping[str, Kind] = {f"guided_{name}": kind for name, kind in GUIDED.items()}
_EBNF_RULE = re.compile(r"^\s*[\w.-]+\s*::=", re.MULTILINE)
"""A rule of EBNF. A grammar without one is Lark, as in vLLM."""
_FIELDS = attrgetter("response_format", "structured_outputs", *GUIDED_FIELDS)


def value_or_none(value: Maybe[T]) -> T | None:
    """Return the value; None if it is absent or null, which both mean the default in requests."""
    return None if value is UNSET else value


def required(value: Maybe[T], path: str) -> T:
    """Return the value. Raise ApiError (400) naming `path` if it is absent or null."""
    if (found := value_or_none(value)) is None:
        raise invalid(path, f"{path} is required, but missing")
    return found


def sampling_params(
    request: Request,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    info: EngineInfo,
    field_names: Mapping[str, str],
    prompt_logprobs: int | None,
    grammar: Grammar | None,
) -> SamplingParams:
    """Return the engine's parameters; absent fields take the model's `info.sampling_defaults`. Errors: ApiError.

    field_names  the engine's name of a field -> this endpoint's name, where they differ
    """
    shared_values = zip(SHARED_FIELDS, _get_shared_fields(request), strict=True)
    fields: dict[str, object] = dict(info.sampling_defaults)
    fields |= {name: value for name, value in shared_values if value is not UNSET and value is not None}
    fields |= {"max_tokens": max_tokens, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs, "grammar": grammar}
    if request.stop is not UNSET:
        fields["stop"] = _stop_strings(request.stop)
    if request.stop_token_ids is not UNSET:
        fields["stop_token_ids"] = tuple(request.stop_token_ids or ())
    if request.bad_words is not UNSET:
        fields["bad_words"] = tuple(request.bad_words or ())
    if request.allowed_token_ids is not UNSET and request.allowed_token_ids is not None:
        fields["allowed_token_ids"] = tuple(request.allowed_token_ids)
    if request.logit_bias is not UNSET:
        fields["logit_bias"] = _biases(request.logit_bias, info.vocab_size)
    if max_tokens == 0 and not _wants_prompt_data(request):
        name = field_names.get("max_tokens", "max_tokens")
        raise invalid(name, f"{name} is 0; allowed: integers from 1, or 0 with echo or prompt_logprobs")
    try:
        return SamplingParams(**fields)  # type: ignore[arg-type]
    except InvalidField as error:
        raise invalid_field(error, field_names.get(error.field, error.field)) from error


def _wants_prompt_data(request: Request) -> bool:
    """Return whether the request asks for data about its prompt, so that max_tokens may be 0."""
    echo = value_or_none(request.echo) if isinstance(request, CompletionRequest) else None
    return bool(echo) or value_or_none(request.prompt_logprobs) is not None


def _stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def _biases(biases: dict[str, float] | None, vocab_size: int) -> dict[int, float] | None:
    """Convert `{"42": 1.5}` to `{42: 1.5}`. Errors: ApiError."""
    for key in biases or ():
        if not _is_canonical_integer(key) or int(key) >= vocab_size:
            allowed = f"token ids from 0 to {vocab_size - 1}, as strings without leading zeros"
            raise invalid("logit_bias", f"logit_bias has the key {key[:80]!r}; allowed: {allowed}")
    return {int(key): bias for key, bias in biases.items()} if biases else None


def _is_canonical_integer(key: str) -> bool:
    """Return whether `key` is a number in canonical spelling: two keys must not mean the same token."""
    return key.isascii() and key.isdigit() and len(key) < 12 and str(int(key)) == key


class RequestedFormat(NamedTuple):
    """A grammar, and the path of the field that asks for it."""

    grammar: Grammar
    field: str


def requested_format(request: Request) -> RequestedFormat | None:
    """Return the grammar that the request asks for; None: any text. Errors: ApiError."""
    if _FIELDS(request).count(UNSET) == len(GUIDED_FIELDS) + 2:  # the common case: all fields are absent
        return None
    formats = list(_requested_formats(request))
    if len(formats) > 1:
        both = " and ".join(one.field for one in formats[:2])
        raise invalid(formats[1].field, f"{both} both set the format of the answer; allowed: one of them")
    return formats[0] if formats else None


def _requested_formats(request: Request) -> Iterator[RequestedFormat]:
    requested = cast("ResponseFormat | None", value_or_none(request.response_format))
    if requested is not None:
        yield from _response_format(requested)
    outputs: StructuredOutputs | None = value_or_none(request.structured_outputs)
    if outputs is not None:
        for name, kind in GUIDED.items():
            yield from _guided_format(kind, value_or_none(getattr(outputs, name)), f"structured_outputs.{name}")
    for name, kind in GUIDED_FIELDS.items():
        value = getattr(request, name)
        if value is not UNSET:
            yield from _guided_format(kind, value, name)


def _response_format(requested: ResponseFormat) -> Iterator[RequestedFormat]:
    if isinstance(requested, JsonObjectFormat):
        yield RequestedFormat(Grammar(kind="json_object"), "response_format")
    if isinstance(requested, JsonSchemaFormat):
        field = "response_format.json_schema.schema"
        schema = required(requested.json_schema.schema, field)
        yield RequestedFormat(_grammar("json_schema", msgspec.json.encode(schema).decode(), field), field)


def _guided_format(
    kind: Kind, value: JSONObject | str | list[str] | bool | None, field: str
) -> Iterator[RequestedFormat]:
    if value is None or value is False:
        return
    if kind == "json_object":
        yield RequestedFormat(Grammar(kind=kind), field)
    else:
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        if kind == "ebnf" and not _EBNF_RULE.search(text):
            kind = "lark"
        yield RequestedFormat(_grammar(kind, text, field), field)


def _grammar(kind: Kind, value: str, field: str) -> Grammar:
    try:
        return Grammar(kind=kind, value=value)
    except InvalidField as error:
        raise invalid_field(error, field) from error
