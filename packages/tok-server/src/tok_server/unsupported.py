"""Fields of OpenAI's reference that this version does not carry out: refused by name, never quietly dropped.

A value that asks for nothing (null, the field's default) is accepted. Fields that only identify the client or
its request (user, metadata, safety_identifier, prompt_cache_key) are accepted with any value: they change no
result.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tok_server.body import Members
from tok_server.errors import invalid

Neutral = tuple[object, ...]

COMPLETION: Mapping[str, Neutral] = {"suffix": (None, ""), "echo": (None, False)}

CHAT: Mapping[str, Neutral] = {
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


def refuse_unsupported(table: Mapping[str, Neutral], given: Members) -> None:
    """Raises ApiError (400) for the first field of `table` whose value asks for something."""
    for name in filter(given.__contains__, table):
        value = msgspec.json.decode(given[name])
        # Compared with the type: in Python False == 0.
        if not any(type(value) is type(one) and value == one for one in table[name]):
            allowed = ", ".join(msgspec.json.encode(one).decode() for one in table[name])
            message = f"{name} is not supported yet; allowed values: {allowed}"
            raise invalid(name, message, "unsupported_parameter")
