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
from tok_server.openai.generation import required, value_or_none
from tok_server.wire import invalid, unsupported

TYPES = ("message", "function_call", "function_call_output", "reasoning")


def messages_of(request_input: str | Sequence[InputItem], instructions: str | None) -> list[Message]:
    """Return the messages, instructions first. Errors: ApiError naming the field ("input[1].content[0].type")."""
    conversation = _Conversation()
    if instructions is not None:
        conversation.messages.append(SystemMessage(content=instructions))
    if isinstance(request_input, str):
        conversation.messages.append(UserMessage(content=request_input))
    else:
        for index, item in enumerate(request_input):
            conversation.add(item, f"input[{index}]")
        conversation.end_turn()
    if not request_input and instructions is None:
        raise invalid("input", "input is empty; allowed: text, or at least one item")
    return conversation.messages


_MESSAGES: Mapping[str, type[UserMessage | SystemMessage | DeveloperMessage]] = {
    "user": UserMessage,
    "system": SystemMessage,
    "developer": DeveloperMessage,
}


class _Conversation:
    """Builder of chat messages: consecutive reasoning, a message and calls become one message of the assistant."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._reasoning_text: str | None = None
        self._content: str | None = None
        self._calls: list[FunctionToolCall | CustomToolCall] = []

    def add(self, item: InputItem, path: str) -> None:
        """Add the next item. Errors: ApiError."""
        match item.type:
            case "message":
                self._message(item, path)
            case "reasoning":
                self._reasoning(item, path)
            case "function_call":
                call = FunctionCall(
                    name=required(item.name, f"{path}.name"), arguments=required(item.arguments, f"{path}.arguments")
                )
                self._calls.append(FunctionToolCall(id=required(item.call_id, f"{path}.call_id"), function=call))
            case "function_call_output":
                self.end_turn()
                content = _text(item.output, f"{path}.output", ("input_text",))
                self.messages.append(
                    ToolMessage(content=content, tool_call_id=required(item.call_id, f"{path}.call_id"))
                )
            case other:
                message = f"{path}.type is {other[:80]!r}; allowed: {', '.join(TYPES)}"
                raise invalid(f"{path}.type", message, "unsupported_parameter")

    def end_turn(self) -> None:
        """Append the assistant's items since the last message, if any, as a message."""
        if self._reasoning_text is None and self._content is None and not self._calls:
            return
        message = AssistantMessage(
            content=self._content or "", reasoning_content=self._reasoning_text, tool_calls=self._calls or None
        )
        self.messages.append(message)
        self._reasoning_text, self._content, self._calls = None, None, []

    def _reasoning(self, item: InputItem, path: str) -> None:
        if self._content is not None or self._calls:
            self.end_turn()
        if value_or_none(item.encrypted_content):
            raise unsupported(f"{path}.encrypted_content", "encrypted reasoning is not supported yet; allowed: null")
        # Some servers return only a summary.
        parts: list[InputPart] | str = value_or_none(item.content) or value_or_none(item.summary) or []
        text = _text(parts, f"{path}.content", ("reasoning_text", "summary_text"))
        self._reasoning_text = (self._reasoning_text or "") + text

    def _message(self, item: InputItem, path: str) -> None:
        role = required(item.role, f"{path}.role")
        text = _text(item.content, f"{path}.content", ("input_text", "output_text"))
        if role == "assistant":
            if self._content is not None or self._calls:
                self.end_turn()
            self._content = text
            return
        self.end_turn()
        self.messages.append(_MESSAGES[role](content=text))


def _text(content: Maybe[str | list[InputPart]], path: str, kinds: Sequence[str]) -> str:
    value = None if isinstance(content, UnsetType) else content
    if value is None:
        raise invalid(path, f"{path} is required, but missing")
    if isinstance(value, str):
        return value
    return "".join(_part(part, f"{path}[{index}]", kinds) for index, part in enumerate(value))


def _part(part: InputPart, path: str, kinds: Sequence[str]) -> str:
    text = getattr(part, "text", None)
    if part.type not in kinds or text is None:
        message = f"content of type {part.type!r} is not supported yet; allowed: {', '.join(kinds)}"
        raise unsupported(f"{path}.type", message)
    return str(text)
