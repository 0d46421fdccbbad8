"""Chat messages as templates take them: a role and one text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from tok_client.types import (
    AssistantMessage,
    AudioPart,
    DeveloperMessage,
    FilePart,
    FunctionMessage,
    ImagePart,
    Message,
    RefusalPart,
    SystemMessage,
    TextPart,
    ToolMessage,
    UnsetType,
    UserMessage,
)
from tok_server.errors import ApiError, invalid
from tok_server.params import given

Part = TextPart | ImagePart | AudioPart | FilePart | RefusalPart


def template_messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    """All messages for the template. Errors: ApiError naming what is refused ("messages[1].tool_calls")."""
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Message, path: str) -> dict[str, str]:
    match message:
        case SystemMessage() | DeveloperMessage():
            # Templates know the newer name of the role only where the model was trained on it.
            return _plain("system", _text(message.content, path), given(message.name))
        case UserMessage():
            return _plain("user", _text(message.content, path), given(message.name))
        case AssistantMessage():
            _check_assistant(message, path)
            content = None if isinstance(message.content, UnsetType) else message.content
            return _plain("assistant", _text(content, path), given(message.name))
        case ToolMessage() | FunctionMessage():
            raise _unsupported(f"{path}.role", f"role {message.role!r} (tool results)")
    assert_never(message)


def _plain(role: str, content: str, name: str | None) -> dict[str, str]:
    named = {} if name is None else {"name": name}
    return {"role": role, "content": content, **named}


def _check_assistant(message: AssistantMessage, path: str) -> None:
    for field in ("tool_calls", "function_call", "audio", "refusal"):
        if given(getattr(message, field)):
            raise _unsupported(f"{path}.{field}", field)
    if given(message.content) is None:
        raise invalid(f"{path}.content", f"{path}.content is missing; allowed: text")


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
