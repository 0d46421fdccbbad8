"""Read and check what endpoints share: the body, the model's name, the cache salt, how to stream."""

from __future__ import annotations

from functools import cache
from typing import TypeVar

import msgspec

from tok_client.types import EmbeddingRequest, StreamOptions
from tok_server.http import members
from tok_server.openai.generation.params import Request, given
from tok_server.openai.generation.unknown_fields import unknown_fields
from tok_server.openai.generation.unsupported_fields import Refused, refuse_unsupported
from tok_server.wire import ApiError, BadJson, decode, invalid

MAX_CACHE_SALT = 1024  # characters
R = TypeVar("R", bound=msgspec.Struct)

# OpenAI's /v1/completions has no `metadata`, but its clients may send it to any endpoint.
HARMLESS = frozenset({"metadata", "user", "safety_identifier", "prompt_cache_key"})


def read(body: bytes, kind: type[R], unsupported: tuple[Refused, ...]) -> tuple[R, tuple[str, ...]]:
    """Decode the body; return the request and the paths of unknown fields (`unknown_fields`). Errors: ApiError 400."""
    found = members(body)
    refuse_unsupported(unsupported, found)
    try:
        request = decode(body, kind)
    except BadJson as error:
        raise invalid(error.path, str(error)) from error
    return request, unknown_fields(request, found, _harmless(unsupported))


@cache
def _harmless(unsupported: tuple[Refused, ...]) -> frozenset[str]:
    """Return the names that count as known: `HARMLESS`, and unsupported fields, which pass only with neutral values."""
    return HARMLESS.union(*(table.fields for table in unsupported))


def check_model(asked: str | None, served: str) -> None:
    """Raise ApiError (404) if the request names another model than the served one."""
    if asked is not None and asked != served:
        message = f"model is {asked[:200]!r}; served here: {served!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


def cache_salt_of(request: Request | EmbeddingRequest) -> str | None:
    """Return the request's salt for the prefix cache. Errors: ApiError 400."""
    salt = given(request.cache_salt)
    if salt is not None and not 1 <= len(salt) <= MAX_CACHE_SALT:
        allowed = f"strings of 1 to {MAX_CACHE_SALT} characters"
        raise invalid("cache_salt", f"cache_salt has {len(salt)} characters; allowed: {allowed}")
    return salt


def wants_usage(request: Request) -> bool:
    """Return whether a stream ends with the usage. Errors: ApiError 400."""
    options: StreamOptions | None = given(request.stream_options)
    if options is None:
        return False
    if not given(request.stream):
        raise invalid("stream_options", "stream_options is only allowed together with stream=true")
    if given(options.include_obfuscation):
        name = "stream_options.include_obfuscation"
        raise invalid(name, f"{name} is not supported yet; allowed: false", "unsupported_parameter")
    return bool(given(options.include_usage))


def wants_continuous_usage(request: Request) -> bool:
    """Return whether every chunk of a stream carries the usage so far."""
    options: StreamOptions | None = given(request.stream_options)
    return options is not None and bool(given(options.continuous_usage_stats))


def check_prompt_logprobs(request: Request) -> int | None:
    """Return the number of top tokens to report per prompt position, if any. Errors: ApiError 400 for a stream."""
    most = given(request.prompt_logprobs)
    if most is not None and given(request.stream):
        raise invalid("prompt_logprobs", "prompt_logprobs is only allowed with stream=false")
    return most
