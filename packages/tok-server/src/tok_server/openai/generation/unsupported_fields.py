"""Refuse fields of OpenAI's reference that an endpoint does not support, by name; never drop them silently.

A value that asks for nothing (null, the field's default) is accepted. Fields that only identify the client or
its request (user, metadata, safety_identifier, prompt_cache_key) are accepted with any value: they change no
result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from tok_client.types import ChatCompletionRequest, CompletionRequest, ResponseRequest, known_fields
from tok_server.http import Members
from tok_server.wire import BadJson, decode, invalid

NeutralValues = tuple[object, ...]


@dataclass(frozen=True, slots=True, eq=False)
class UnsupportedFields:
    """Unsupported fields, each with its neutral values (which ask for nothing), and why other values are refused."""

    fields: Mapping[str, NeutralValues]
    reason: str


_COMPLETION: Mapping[str, NeutralValues] = {"suffix": (None, "")}

_CHAT: Mapping[str, NeutralValues] = {
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "moderation": (None,),
    "verbosity": (None, "medium"),
    "store": (None, False),
    "service_tier": (None, "auto", "default"),
    "prompt_cache_retention": (None, "in_memory", "in-memory"),
    "prompt_cache_options": (None, {}),
}

_CHAT_ONLY: Mapping[str, NeutralValues] = {
    "messages": (None,),
    "max_completion_tokens": (None,),
    "top_logprobs": (None,),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "reasoning_effort": (None, "none"),
    "chat_template_kwargs": (None, {}),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
}

_NOT_SUPPORTED = "is not supported yet"

COMPLETION = (
    UnsupportedFields(_COMPLETION, _NOT_SUPPORTED),
    UnsupportedFields(
        {**_CHAT_ONLY, **_CHAT},
        "is a field of /v1/chat/completions, not of /v1/completions",
    ),
)
CHAT = (
    UnsupportedFields(_CHAT, _NOT_SUPPORTED),
    UnsupportedFields(
        {"prompt": (None,), "best_of": (None, 1), "echo": (None, False), **_COMPLETION},
        "is a field of /v1/completions, not of /v1/chat/completions",
    ),
)
_RESPONSE: Mapping[str, NeutralValues] = {
    "store": (None, False),
    "previous_response_id": (None,),
    "conversation": (None,),
    "background": (None, False),
    "prompt": (None,),
    "truncation": (None, "disabled"),
    "max_tool_calls": (None,),
    "context_management": (None, []),
    "moderation": (None,),
    "service_tier": (None, "auto", "default"),
    "prompt_cache_retention": (None, "in_memory", "in-memory"),
    "prompt_cache_options": (None, {}),
}
_OTHER_ENDPOINTS = (known_fields(ChatCompletionRequest) | known_fields(CompletionRequest)) - known_fields(
    ResponseRequest
)
_OTHER_ENDPOINTS_NEUTRAL: Mapping[str, NeutralValues] = {"n": (None, 1)}

RESPONSE = (
    UnsupportedFields(_RESPONSE, _NOT_SUPPORTED),
    UnsupportedFields(
        {name: _OTHER_ENDPOINTS_NEUTRAL.get(name, (None,)) for name in sorted(_OTHER_ENDPOINTS)},
        "is a field of other endpoints, not of /v1/responses",
    ),
)


def refuse_unsupported(tables: tuple[UnsupportedFields, ...], members: Members) -> None:
    """Raise ApiError (400) for the first field of `tables` whose value is not neutral."""
    for table in tables:
        if not table.fields.keys().isdisjoint(members):
            for name in filter(members.__contains__, table.fields):
                _check(name, members[name], table)


def _check(name: str, raw: msgspec.Raw, table: UnsupportedFields) -> None:
    try:
        value = decode(raw, object)
    except BadJson as error:  # a number out of range
        raise invalid(name, f"{name}: {error}") from error
    # Types are compared, too: in Python False == 0.
    if not any(type(value) is type(one) and value == one for one in table.fields[name]):
        allowed = ", ".join(msgspec.json.encode(one).decode() for one in table.fields[name])
        raise invalid(name, f"{name} {table.reason}; allowed values: {allowed}", "unsupported_parameter")
