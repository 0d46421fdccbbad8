"""Decode a request's body; refuse fields that are not supported, list those that are unknown, read common ones.

Fields of OpenAI's reference that an endpoint does not support are refused by name, unless their value asks for nothing
(null, the field's default). Fields that only identify the client or its request (user, metadata, safety_identifier,
prompt_cache_key) are accepted with any value: they change no result. So are fields that ask a hosted service for
something other than another answer (store, service_tier), but they are listed as ignored.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from heapq import nsmallest
from itertools import chain, islice
from typing import Any, TypeVar

import msgspec
from msgspec.inspect import ListType, StructType, Type, UnionType, VarTupleType

from tok_client.types import (
    ChatCompletionRequest,
    CompletionRequest,
    EmbeddingRequest,
    RerankRequest,
    ResponseRequest,
    ScoreRequest,
    StreamOptions,
    known_fields,
)
from tok_server.http import Members, decode_members
from tok_server.openai.generation.other_servers import (
    OTHER_SERVERS,
    REFUSED_PATHS,
    NeutralValues,
    UnsupportedFields,
)
from tok_server.openai.generation.params import Request, value_or_none
from tok_server.wire import ApiError, BadJson, decode, invalid

MAX_LISTED_FIELDS = 32  # names that fit into a header

MAX_CACHE_SALT = 1024  # characters
R = TypeVar("R", bound=msgspec.Struct)

# OpenAI's /v1/completions has no `metadata`, but its clients may send it to any endpoint.
ACCEPTED_FIELDS = frozenset({"metadata", "user", "safety_identifier", "prompt_cache_key"})

WITHOUT_EFFECT: Mapping[str, NeutralValues] = {
    "store": (None, False),
    "service_tier": (None, "auto", "default"),
    "prompt_cache_retention": (None, "in_memory", "in-memory"),
    "prompt_cache_options": (None, {}),
    "max_tool_calls": (None,),  # only limits calls of built-in tools, which no request can have
}
"""Fields that change no answer here, with their neutral values; other values are listed as ignored."""


_COMPLETION: Mapping[str, NeutralValues] = {"suffix": (None, "")}

_CHAT: Mapping[str, NeutralValues] = {
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "moderation": (None,),
}

_CHAT_ONLY: Mapping[str, NeutralValues] = {
    "messages": (None,),
    "max_completion_tokens": (None,),
    "top_logprobs": (None,),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "reasoning_effort": (None, "none"),
    "verbosity": (None, "medium"),
    "chat_template_kwargs": (None, {}),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
}
_NOT_SUPPORTED = "is not supported yet"

COMPLETION = (
    *OTHER_SERVERS,
    UnsupportedFields(_COMPLETION, _NOT_SUPPORTED),
    UnsupportedFields({**_CHAT_ONLY, **_CHAT}, "is a field of /v1/chat/completions, not of /v1/completions"),
)
CHAT = (
    *OTHER_SERVERS,
    UnsupportedFields(_CHAT, _NOT_SUPPORTED),
    UnsupportedFields(
        {"prompt": (None,), "best_of": (None, 1), "echo": (None, False), **_COMPLETION},
        "is a field of /v1/completions, not of /v1/chat/completions",
    ),
)
_RESPONSE: Mapping[str, NeutralValues] = {
    "previous_response_id": (None,),
    "conversation": (None,),
    "background": (None, False),
    "prompt": (None,),
    "context_management": (None, []),
    "moderation": (None,),
}
_OTHER_ENDPOINTS = (known_fields(ChatCompletionRequest) | known_fields(CompletionRequest)) - known_fields(
    ResponseRequest
)
_OTHER_ENDPOINTS_NEUTRAL: Mapping[str, NeutralValues] = {"n": (None, 1)}

RESPONSE = (
    *(replace(one, reason=one.reason.replace("max_tokens", "max_output_tokens")) for one in OTHER_SERVERS),
    UnsupportedFields(_RESPONSE, _NOT_SUPPORTED),
    UnsupportedFields(
        {name: _OTHER_ENDPOINTS_NEUTRAL.get(name, (None,)) for name in sorted(_OTHER_ENDPOINTS)},
        "is a field of other endpoints, not of /v1/responses",
    ),
)


def parse_request(body: bytes, kind: type[R], unsupported: tuple[UnsupportedFields, ...]) -> tuple[R, tuple[str, ...]]:
    """Decode the body; return the request and the paths of fields that are ignored. Errors: ApiError 400.

    Ignored are fields of `WITHOUT_EFFECT`, unless their value is neutral, and unknown fields (`unknown_fields`).
    """
    members = decode_members(body)
    refuse_unsupported(unsupported, members)
    request = decode(body, kind)
    unknown = unknown_fields(request, members, _accepted_fields(unsupported))
    for path in REFUSED_PATHS.keys() & set(unknown):
        _refuse_nested(path, members)
    return request, (*_without_effect(members), *unknown)[:MAX_LISTED_FIELDS]


def _refuse_nested(path: str, members: Members) -> None:
    """Raise ApiError (400) unless the unknown field inside a top-level one is null or false."""
    field, _, name = path.partition(".")
    value = decode(members[field], dict)
    if value[name] is not None and value[name] is not False:
        raise invalid(path, f"{path} {REFUSED_PATHS[path]}; allowed values: null", "unsupported_parameter")


@cache
def _accepted_fields(unsupported: tuple[UnsupportedFields, ...]) -> frozenset[str]:
    """Return the names that count as known, including unsupported fields, which pass only with neutral values."""
    return ACCEPTED_FIELDS.union(WITHOUT_EFFECT, _listed_fields(unsupported))


@cache
def _listed_fields(tables: tuple[UnsupportedFields, ...]) -> frozenset[str]:
    """Return the names of all fields of the tables."""
    return frozenset().union(*(table.fields for table in tables))


def _without_effect(members: Members) -> Iterator[str]:
    """Yield the fields of `WITHOUT_EFFECT` whose value is not neutral."""
    if not WITHOUT_EFFECT.keys().isdisjoint(members):
        for name in filter(members.__contains__, WITHOUT_EFFECT):
            if not _is_neutral(_decoded(name, members), WITHOUT_EFFECT[name]):
                yield name


def refuse_unsupported(tables: tuple[UnsupportedFields, ...], members: Members) -> None:
    """Raise ApiError (400) for the first field of `tables` whose value is not neutral."""
    if _listed_fields(tables).isdisjoint(members):  # nearly always
        return
    for table in tables:
        if not table.fields.keys().isdisjoint(members):
            for name in filter(members.__contains__, table.fields):
                if not _is_neutral(_decoded(name, members), table.fields[name]):
                    allowed = ", ".join(msgspec.json.encode(one).decode() for one in table.fields[name])
                    raise invalid(name, f"{name} {table.reason}; allowed values: {allowed}", "unsupported_parameter")


def _decoded(name: str, members: Members) -> object:
    try:
        return decode(members[name], object)
    except BadJson as error:  # a number out of range
        raise invalid(name, f"{name}: {error}") from error


def _is_neutral(value: object, neutral: NeutralValues) -> bool:
    # Types are compared, too: in Python False == 0.
    return any(type(value) is type(one) and value == one for one in neutral)


def unknown_fields(request: msgspec.Struct, found: Members, accepted: frozenset[str]) -> tuple[str, ...]:
    """Return the paths of unknown fields ("zeta", "messages[0].foo"), top level first; at most `MAX_LISTED_FIELDS`.

    found     the members of the request's JSON
    accepted  names that count as known, in addition to those of the type
    """
    if found.keys() <= _unchecked_fields(type(request), accepted):
        return ()
    known = known_fields(type(request))
    # Only the smallest names are sorted: sorting all would hold the interpreter lock.
    top_level = nsmallest(MAX_LISTED_FIELDS, found.keys() - known - accepted)
    nested = sorted(name for name in found if name in known and _holds_structs(getattr(request, name)))
    if not top_level and not nested:
        return ()
    nested_paths = chain.from_iterable(
        _nested_unknown_fields(name, getattr(request, name), decode(found[name], object)) for name in nested
    )
    return tuple(islice(chain(top_level, nested_paths), MAX_LISTED_FIELDS))


@cache
def _unchecked_fields(kind: type[msgspec.Struct], accepted: frozenset[str]) -> frozenset[str]:
    """Return names whose values need no check: fields that cannot hold structs, and accepted names outside the type."""
    type_info = msgspec.inspect.type_info(kind)
    assert isinstance(type_info, StructType)
    plain = (one.encode_name for one in type_info.fields if not _may_hold_structs(one.type))
    return (accepted - known_fields(kind)).union(plain)


def _may_hold_structs(kind: Type) -> bool:
    match kind:
        case UnionType(types=types):
            return any(map(_may_hold_structs, types))
        case ListType(item_type=item) | VarTupleType(item_type=item):
            return _may_hold_structs(item)
    return isinstance(kind, StructType)


def _holds_structs(value: object) -> bool:
    """Return whether `value` is a struct or a list of structs: others, such as long prompts, are not decoded again."""
    first = value[0] if isinstance(value, list) and value else value
    return isinstance(first, msgspec.Struct)


def _nested_unknown_fields(path: str, value: object, raw_value: object) -> Iterator[str]:
    """Yield the paths of unknown fields inside `value`. `raw_value`: the JSON from which it was decoded."""
    if isinstance(value, list) and isinstance(raw_value, list):
        for index, (item, raw) in enumerate(zip(value, raw_value, strict=True)):
            yield from _nested_unknown_fields(f"{path}[{index}]", item, raw)
    elif isinstance(value, msgspec.Struct) and isinstance(raw_value, dict):
        known = known_fields(type(value))
        for name, raw in raw_value.items():
            if name in known:
                yield from _nested_unknown_fields(f"{path}.{name}", getattr(value, name), raw)
            else:
                yield f"{path}.{name}"


def check_model(requested: str | None, names: tuple[str, ...]) -> str:
    """Return the first of `names`, for the answer. Raise ApiError (404) if `requested` is not among them."""
    if requested is not None and requested not in names:
        message = f"model is {requested[:200]!r}; allowed: {', '.join(map(repr, names))}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return names[0]


def cache_salt_of(request: Request | EmbeddingRequest | ScoreRequest | RerankRequest) -> str | None:
    """Return the request's salt for the prefix cache. Errors: ApiError 400."""
    salt = value_or_none(request.cache_salt)
    if salt is not None and not 1 <= len(salt) <= MAX_CACHE_SALT:
        allowed = f"strings of 1 to {MAX_CACHE_SALT} characters"
        raise invalid("cache_salt", f"cache_salt has {len(salt)} characters; allowed: {allowed}")
    return salt


def common_fields(request: Request) -> dict[str, Any]:
    """Return the fields of a `GenerationJob` that chats and completions read alike. Errors: ApiError 400."""
    return {
        "created": int(time.time()),
        "stream": bool(value_or_none(request.stream)),
        "include_usage": _wants_usage(request),
        "continuous_usage": _wants_continuous_usage(request),
        "return_token_ids": bool(value_or_none(request.return_token_ids)),
        "tokens_as_ids": bool(value_or_none(request.return_tokens_as_token_ids)),
        "prompt_logprobs": check_prompt_logprobs(request),
        "cache_salt": cache_salt_of(request),
    }


def _wants_usage(request: Request) -> bool:
    """Return whether a stream ends with the usage. Errors: ApiError 400."""
    options: StreamOptions | None = value_or_none(request.stream_options)
    if options is None:
        return False
    if not value_or_none(request.stream):
        raise invalid("stream_options", "stream_options is only allowed together with stream=true")
    if value_or_none(options.include_obfuscation):
        name = "stream_options.include_obfuscation"
        raise invalid(name, f"{name} is not supported yet; allowed: false", "unsupported_parameter")
    return bool(value_or_none(options.include_usage))


def _wants_continuous_usage(request: Request) -> bool:
    """Return whether every chunk of a stream carries the usage so far."""
    options: StreamOptions | None = value_or_none(request.stream_options)
    return options is not None and bool(value_or_none(options.continuous_usage_stats))


def check_prompt_logprobs(request: Request) -> int | None:
    """Return the number of top tokens to report per prompt position, if any. Errors: ApiError 400 for a stream."""
    top_logprobs = value_or_none(request.prompt_logprobs)
    if top_logprobs is not None and value_or_none(request.stream):
        raise invalid("prompt_logprobs", "prompt_logprobs is only allowed with stream=false")
    return top_logprobs
