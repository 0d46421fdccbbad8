"""Fields of OpenAI's reference that an endpoint does not carry out: refused by name, never quietly dropped.

A value that asks for nothing (null, the field's default) is accepted. Fields that only identify the client or
its request (user, metadata, safety_identifier, prompt_cache_key) are accepted with any value: they change no
result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from tok_server.body import Members
from tok_server.errors import invalid

Neutral = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """Fields, each with the values that ask for nothing, and why all others are refused."""

    fields: Mapping[str, Neutral]
    why: str


_COMPLETION: Mapping[str, Neutral] = {"suffix": (None, ""), "echo": (None, False)}

_CHAT: Mapping[str, Neutral] = {
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),  # without tools there is nothing to run in parallel
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "moderation": (None,),
    "verbosity": (None, "medium"),
    "reasoning_effort": (None, "none"),
    "store": (None, False),
    "service_tier": (None, "auto", "default"),
    "prompt_cache_retention": (None, "in_memory", "in-memory"),
    "prompt_cache_options": (None, {}),
}

_NOT_YET = "is not supported yet"

COMPLETION = (
    Refused(_COMPLETION, _NOT_YET),
    Refused(
        {"messages": (None,), "max_completion_tokens": (None,), "top_logprobs": (None,), **_CHAT},
        "is a field of /v1/chat/completions, not of /v1/completions",
    ),
)
CHAT = (
    Refused(_CHAT, _NOT_YET),
    Refused(
        {"prompt": (None,), "best_of": (None, 1), **_COMPLETION},
        "is a field of /v1/completions, not of /v1/chat/completions",
    ),
)


def refuse_unsupported(tables: tuple[Refused, ...], given: Members) -> None:
    """Raises ApiError (400) for the first field of `tables` whose value asks for something."""
    for table in tables:
        for name in filter(given.__contains__, table.fields):
            _check(name, given[name], table)


def _check(name: str, raw: msgspec.Raw, table: Refused) -> None:
    value = msgspec.json.decode(raw)
    # Compared with the type: in Python False == 0.
    if not any(type(value) is type(one) and value == one for one in table.fields[name]):
        allowed = ", ".join(msgspec.json.encode(one).decode() for one in table.fields[name])
        raise invalid(name, f"{name} {table.why}; allowed values: {allowed}", "unsupported_parameter")
