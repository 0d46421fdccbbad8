"""The keyword parameters of `create`, under the names of the wire, and the body made of them.

What is not given (or is `UNSET`) is not sent; None is sent as null.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Required, TypedDict, cast
from urllib.parse import quote

import msgspec

from tok_client.types import (
    UNSET,
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    Maybe,
    Message,
    StreamOptions,
)

Object = Mapping[str, object]


class GenerationParams(TypedDict, total=False):
    """What both endpoints take; see `tok_client.types.GenerationRequest`."""

    model: Required[str]
    max_tokens: Maybe[int]
    temperature: Maybe[float]
    top_p: Maybe[float]
    n: Maybe[int]
    stream_options: Maybe[StreamOptions | Object]
    stop: Maybe[str | Sequence[str]]
    presence_penalty: Maybe[float]
    frequency_penalty: Maybe[float]
    logit_bias: Maybe[Mapping[str, float] | Mapping[int, float]]
    user: Maybe[str]
    seed: Maybe[int]
    top_k: Maybe[int]
    min_p: Maybe[float]
    repetition_penalty: Maybe[float]
    min_tokens: Maybe[int]
    ignore_eos: Maybe[bool]
    priority: Maybe[int]
    stop_token_ids: Maybe[Sequence[int]]
    return_token_ids: Maybe[bool]


class CompletionParams(GenerationParams, total=False):
    """What `completions.create` takes; see `tok_client.types.CompletionRequest`."""

    prompt: Required[str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]]
    logprobs: Maybe[int]
    echo: Maybe[bool]
    best_of: Maybe[int]
    suffix: Maybe[str]


class ChatCompletionParams(GenerationParams, total=False):
    """What `chat.completions.create` takes; see `tok_client.types.ChatCompletionRequest`."""

    messages: Required[Sequence[Message | ChatMessage | Object]]
    logprobs: Maybe[bool]
    top_logprobs: Maybe[int]
    max_completion_tokens: Maybe[int]
    tools: Maybe[Sequence[Object]]
    tool_choice: Maybe[str | Object]
    parallel_tool_calls: Maybe[bool]
    functions: Maybe[Sequence[Object]]
    function_call: Maybe[str | Object]
    response_format: Maybe[Object]
    modalities: Maybe[Sequence[Literal["text", "audio"]]]
    audio: Maybe[Object]
    prediction: Maybe[Object]
    reasoning_effort: Maybe[Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]]
    verbosity: Maybe[Literal["low", "medium", "high"]]
    web_search_options: Maybe[Object]
    moderation: Maybe[Object]
    store: Maybe[bool]
    metadata: Maybe[Mapping[str, str]]
    service_tier: Maybe[Literal["auto", "default", "flex", "scale", "priority", "fast"]]
    safety_identifier: Maybe[str]
    prompt_cache_key: Maybe[str]
    prompt_cache_retention: Maybe[Literal["in_memory", "24h"]]
    prompt_cache_options: Maybe[Object]


def completion_body(params: CompletionParams, stream: bool, extra: Object | None) -> bytes:
    """The JSON body of `POST /completions`."""
    return _body(CompletionRequest, cast(Object, params), stream, extra)


def chat_completion_body(params: ChatCompletionParams, stream: bool, extra: Object | None) -> bytes:
    """The JSON body of `POST /chat/completions`."""
    return _body(ChatCompletionRequest, cast(Object, params), stream, extra)


def _body(kind: Callable[..., msgspec.Struct], params: Object, stream: bool, extra: Object | None) -> bytes:
    """TypeError: a parameter the wire does not know, no JSON. ValueError: NaN, infinity, a lone surrogate."""
    for name, value in params.items():
        if isinstance(value, float) and not math.isfinite(value):  # JSON has neither: it would be sent as null
            raise ValueError(f"{name} is {value}; allowed: finite numbers")
    request = kind(**params, stream=True if stream else UNSET)
    try:
        if not extra:
            return msgspec.json.encode(request)
        return msgspec.json.encode({**msgspec.to_builtins(request), **extra})
    except UnicodeEncodeError:
        raise _surrogate(_at_fault({**params, **(extra or {})})) from None


def model_path(model: str) -> str:
    """The path of one model. ValueError: a lone surrogate."""
    try:
        return f"/models/{quote(model, safe='')}"
    except UnicodeEncodeError:
        raise _surrogate("model") from None


def _at_fault(params: Object) -> str:
    """The parameter that is no Unicode."""
    for name, value in params.items():
        try:
            msgspec.json.encode({name: value})
        except UnicodeEncodeError:
            return ascii(name).strip("'")
    return "extra_body"


def _surrogate(name: str) -> ValueError:
    return ValueError(
        f"{name} has a lone surrogate (half of a UTF-16 pair), which UTF-8 cannot carry; allowed: valid text"
    )
