"""Convert chat messages to the form that templates take: a role, one text, and the assistant's calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

import msgspec

from tok_client.types import (
    AssistantMessage,
    AudioPart,
    CustomToolCall,
    DeveloperMessage,
    FilePart,
    FunctionMessage,
    FunctionToolCall,
    ImagePart,
    Message,
    RefusalPart,
    SystemMessage,
    TextPart,
    ToolMessage,
    UnsetType,
    UserMessage,
)
from tok_server.openai.generation import value_or_none
from tok_server.wire import ApiError, invalid

Part = TextPart | ImagePart | AudioPart | FilePart | RefusalPart
TemplateMessage = dict[str, object]

MAX_MESSAGES = 8192  # messages of a chat: a template takes some microseconds for each


def template_messages(messages: Sequence[Message]) -> list[TemplateMessage]:
    """Convert all messages for the template. Errors: ApiError naming the refused field ("messages[1].audio")."""
    if len(messages) > MAX_MESSAGES:
        raise invalid("messages", f"messages holds {len(messages)} messages; allowed: at most {MAX_MESSAGES}")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Message, path: str) -> TemplateMessage:
    match message:
        case SystemMessage() | DeveloperMessage():
            # Only templates of models that were trained on the newer role "developer" know it.
            return _text_message("system", _text(message.content, path), value_or_none(message.name))
        case UserMessage():
            return _text_message("user", _text(message.content, path), value_or_none(message.name))
        case AssistantMessage():
            return _assistant(message, path)
        case ToolMessage():
            return {"role": "tool", "content": _text(message.content, path), "tool_call_id": message.tool_call_id}
        case FunctionMessage():
            raise _unsupported(f"{path}.role", f"role {message.role!r} (use role 'tool')")
    assert_never(message)


def _text_message(role: str, content: str, name: str | None) -> TemplateMessage:
    name_member = {} if name is None else {"name": name}
    return {"role": role, "content": content, **name_member}


def _assistant(message: AssistantMessage, path: str) -> TemplateMessage:
    for field in ("function_call", "audio", "refusal"):
        if value_or_none(getattr(message, field)):
            raise _unsupported(f"{path}.{field}", field)
    calls = value_or_none(message.tool_calls) or []
    content = None if isinstance(message.content, UnsetType) else message.content
    if content is None and not calls:
        raise invalid(f"{path}.content", f"{path}.content is missing; allowed: text, or tool_calls instead")
    template_message = _text_message("assistant", _text(content, path), value_or_none(message.name))
    if calls:
        template_message["tool_calls"] = [
            _call(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(calls)
        ]
    reasoning = value_or_none(message.reasoning_content)
    if reasoning:
        template_message["reasoning_content"] = reasoning
    return template_message


def _call(call: FunctionToolCall | CustomToolCall, path: str) -> TemplateMessage:
    if isinstance(call, CustomToolCall):
        raise _unsupported(f"{path}.type", "a call of type 'custom'")
    function = {"name": call.function.name, "arguments": _arguments(call.function.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _arguments(text: str) -> object:
    """Parse the arguments into an object, as templates expect; return the text unchanged if it is no object."""
    try:
        value = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _text(content: str | Sequence[Part] | None, path: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = []
    for index, part in enumerate(content):
        if not isinstance(part, TextPart):
            raise _unsupported(f"{path}.content[{index}].type", f"content of type {part.type!r}")
        parts.append(part.text)
    return "".join(parts)


def _unsupported(path: str, what: str) -> ApiError:
    return invalid(path, f"{path}: {what} is not supported yet; allowed: text", "unsupported_parameter")
