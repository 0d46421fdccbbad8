"""Read and check what endpoints share: the body, the model's name, the cache salt, how to stream."""

from __future__ import annotations

from functools import cache
from typing import TypeVar

import msgspec

from tok_client.types import EmbeddingRequest, StreamOptions
from tok_server.http import decode_members
from tok_server.openai.generation.params import Request, value_or_none
from tok_server.openai.generation.unknown_fields import unknown_fields
from tok_server.openai.generation.unsupported_fields import UnsupportedFields, refuse_unsupported
from tok_server.wire import ApiError, BadJson, decode, invalid

MAX_CACHE_SALT = 1024  # characters
R = TypeVar("R", bound=msgspec.Struct)

# OpenAI's /v1/completions has no `metadata`, but its clients may send it to any endpoint.
ACCEPTED_FIELDS = frozenset({"metadata", "user", "safety_identifier", "prompt_cache_key"})


def parse_request(body: bytes, kind: type[R], unsupported: tuple[UnsupportedFields, ...]) -> tuple[R, tuple[str, ...]]:
    """Decode the body; return the request and the paths of unknown fields (`unknown_fields`). Errors: ApiError 400."""
    members = decode_members(body)
    refuse_unsupported(unsupported, members)
    try:
        request = decode(body, kind)
    except BadJson as error:
        raise invalid(error.path, str(error)) from error
    return request, unknown_fields(request, members, _accepted_fields(unsupported))


@cache
def _accepted_fields(unsupported: tuple[UnsupportedFields, ...]) -> frozenset[str]:
    """Return the names that count as known, including unsupported fields, which pass only with neutral values."""
    return ACCEPTED_FIELDS.union(*(table.fields for table in unsupported))


def check_model(requested: str | None, served: str) -> None:
    """Raise ApiError (404) if the request names another model than the served one."""
    if requested is not None and requested != served:
        message = f"model is {requested[:200]!r}; allowed: {served!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


def cache_salt_of(request: Request | EmbeddingRequest) -> str | None:
    """Return the request's salt for the prefix cache. Errors: ApiError 400."""
    salt = value_or_none(request.cache_salt)
    if salt is not None and not 1 <= len(salt) <= MAX_CACHE_SALT:
        allowed = f"strings of 1 to {MAX_CACHE_SALT} characters"
        raise invalid("cache_salt", f"cache_salt has {len(salt)} characters; allowed: {allowed}")
    return salt


def wants_usage(request: Request) -> bool:
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


def wants_continuous_usage(request: Request) -> bool:
    """Return whether every chunk of a stream carries the usage so far."""
    options: StreamOptions | None = value_or_none(request.stream_options)
    return options is not None and bool(value_or_none(options.continuous_usage_stats))


def check_prompt_logprobs(request: Request) -> int | None:
    """Return the number of top tokens to report per prompt position, if any. Errors: ApiError 400 for a stream."""
    top_logprobs = value_or_none(request.prompt_logprobs)
    if top_logprobs is not None and value_or_none(request.stream):
        raise invalid("prompt_logprobs", "prompt_logprobs is only allowed with stream=false")
    return top_logprobs
