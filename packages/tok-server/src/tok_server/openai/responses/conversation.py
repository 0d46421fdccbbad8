"""Convert the items of a response's input into chat messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tok_client.types import (
    AssistantMessage,
    CustomToolCall,
    DeveloperMessage,
    FunctionCall,
    FunctionToolCall,
    InputItem,
    InputPart,
    Maybe,
    Message,
    SystemMessage,
    ToolMessage,
    UnsetType,
    UserMessage,
)
from tok_server.openai.generation import given
from tok_server.wire import ApiError, invalid

TYPES = ("message", "function_call", "function_call_output", "reasoning")


def messages_of(given_input: str | Sequence[InputItem], instructions: str | None) -> list[Message]:
    """Return the messages, instructions first. Errors: ApiError naming the field ("input[1].content[0].type")."""
    found = _Conversation()
    if instructions is not None:
        found.messages.append(SystemMessage(content=instructions))
    if isinstance(given_input, str):
        found.messages.append(UserMessage(content=given_input))
    else:
        for index, item in enumerate(given_input):
            found.take(item, f"input[{index}]")
        found.end_turn()
    if not given_input and instructions is None:
        raise invalid("input", "input is empty; allowed: text, or at least one item")
    return found.messages


_MESSAGES: Mapping[str, type[UserMessage | SystemMessage | DeveloperMessage]] = {
    "user": UserMessage,
    "system": SystemMessage,
    "developer": DeveloperMessage,
}


class _Conversation:
    """Builder of chat messages: consecutive reasoning, a message and calls become one message of the assistant."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._thoughts: str | None = None
        self._said: str | None = None
        self._calls: list[FunctionToolCall | CustomToolCall] = []

    def take(self, item: InputItem, path: str) -> None:
        """Add the next item. Errors: ApiError."""
        match item.type:
            case "message":
                self._message(item, path)
            case "reasoning":
                self._reasoning(item, path)
            case "function_call":
                call = FunctionCall(name=_needed(item, "name", path), arguments=_needed(item, "arguments", path))
                self._calls.append(FunctionToolCall(id=_needed(item, "call_id", path), function=call))
            case "function_call_output":
                self.end_turn()
                said = _text(item.output, f"{path}.output", ("input_text",))
                self.messages.append(ToolMessage(content=said, tool_call_id=_needed(item, "call_id", path)))
            case other:
                message = f"{path}.type is {other[:80]!r}; allowed: {', '.join(TYPES)}"
                raise invalid(f"{path}.type", message, "unsupported_parameter")

    def end_turn(self) -> None:
        """Append the assistant's items since the last message, if any, as a message."""
        if self._thoughts is None and self._said is None and not self._calls:
            return
        message = AssistantMessage(
            content=self._said or "", reasoning_content=self._thoughts, tool_calls=self._calls or None
        )
        self.messages.append(message)
        self._thoughts, self._said, self._calls = None, None, []

    def _reasoning(self, item: InputItem, path: str) -> None:
        if self._said is not None or self._calls:
            self.end_turn()
        if given(item.encrypted_content):
            raise _unsupported(f"{path}.encrypted_content", "encrypted reasoning", "null")
        # Some servers return only a summary.
        parts: list[InputPart] | str = given(item.content) or given(item.summary) or []
        text = _text(parts, f"{path}.content", ("reasoning_text", "summary_text"))
        self._thoughts = (self._thoughts or "") + text

    def _message(self, item: InputItem, path: str) -> None:
        role = given(item.role)
        if role is None:
            raise invalid(f"{path}.role", f"{path}.role is required, but missing")
        text = _text(item.content, f"{path}.content", ("input_text", "output_text"))
        if role == "assistant":
            if self._said is not None or self._calls:
                self.end_turn()
            self._said = text
            return
        self.end_turn()
        self.messages.append(_MESSAGES[role](content=text))


def _needed(item: InputItem, name: str, path: str) -> str:
    found: str | None = given(getattr(item, name))
    if found is None:
        raise invalid(f"{path}.{name}", f"{path}.{name} is required, but missing")
    return found


def _text(content: Maybe[str | list[InputPart]], path: str, kinds: Sequence[str]) -> str:
    found = None if isinstance(content, UnsetType) else content
    if found is None:
        raise invalid(path, f"{path} is required, but missing")
    if isinstance(found, str):
        return found
    return "".join(_part(part, f"{path}[{index}]", kinds) for index, part in enumerate(found))


def _part(part: InputPart, path: str, kinds: Sequence[str]) -> str:
    text = getattr(part, "text", None)
    if part.type not in kinds or text is None:
        raise _unsupported(f"{path}.type", f"content of type {part.type!r}", ", ".join(kinds))
    return str(text)


def _unsupported(path: str, what: str, allowed: str) -> ApiError:
    return invalid(path, f"{path}: {what} is not supported here; allowed: {allowed}", "unsupported_parameter")
