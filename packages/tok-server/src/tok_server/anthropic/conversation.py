"""Convert the system prompt and messages of a request into chat messages."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tok_client.types import (
    AssistantMessage,
    CustomToolCall,
    FunctionCall,
    FunctionToolCall,
    Message,
    SystemMessage,
    ToolMessage,
    UnsetType,
    UserMessage,
)
from tok_server.anthropic.request_types import InputBlock, InputMessage, TextInput
from tok_server.openai import required, value_or_none
from tok_server.wire import ApiError, invalid, unsupported

ERROR_PREFIX = "Error: "  # precedes the result of a failed call: chat templates know no other mark


def chat_messages(messages: Sequence[InputMessage], system: str | Sequence[TextInput] | None) -> list[Message]:
    """Return the chat's messages, the system prompt first.

    Consecutive messages of one role become one, as the API defines. Blocks of text are separate lines.

    Errors: ApiError naming the field ("messages[1].content[0].type").
    """
    conversation = _Conversation()
    if system:
        conversation.messages.append(SystemMessage(content=_text(system, "system")))
    for index, message in enumerate(messages):
        conversation.add(message, f"messages[{index}]")
    conversation.end_turn()
    if not messages or not any(message.content for message in messages):
        raise invalid("messages", "messages has no content; allowed: at least one message with text")
    return conversation.messages


class _Conversation:
    """Builder of chat messages. Blocks are collected until the role changes or a tool's result interrupts the text."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._role = ""
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[FunctionToolCall | CustomToolCall] = []

    def add(self, message: InputMessage, path: str) -> None:
        """Add the next message. Errors: ApiError."""
        if message.role != self._role:
            self.end_turn()
            self._role = message.role
        if isinstance(message.content, str):
            self._texts.append(message.content)
            return
        for index, block in enumerate(message.content):
            self._add_block(block, f"{path}.content[{index}]")

    def end_turn(self) -> None:
        """Append the message of the current role, if there is one."""
        if self._role == "assistant":
            self.messages.append(
                AssistantMessage(
                    content="\n".join(self._texts),
                    reasoning_content="".join(self._reasoning) or None,
                    tool_calls=self._calls or None,
                )
            )
        elif self._texts:
            content = "\n".join(self._texts)
            kind = SystemMessage if self._role == "system" else UserMessage
            self.messages.append(kind(content=content))
        self._texts, self._reasoning, self._calls = [], [], []

    def _add_block(self, block: InputBlock, path: str) -> None:
        match self._role, block.type:
            case _, "text":
                self._texts.append(required(block.text, f"{path}.text"))
            case "user", "tool_result":
                self.end_turn()
                self.messages.append(_tool_result(block, path))
            case "assistant", "thinking":
                self._reasoning.append(required(block.thinking, f"{path}.thinking"))
            case "assistant", "tool_use":
                arguments = msgspec.json.encode(required(block.input, f"{path}.input")).decode()
                call = FunctionCall(name=required(block.name, f"{path}.name"), arguments=arguments)
                self._calls.append(FunctionToolCall(id=required(block.id, f"{path}.id"), function=call))
            case _:
                allowed = {"user": "text, tool_result", "assistant": "text, thinking, tool_use", "system": "text"}
                raise _unsupported_block(block.type, path, f"{allowed[self._role]} in a message of {self._role}")


def _tool_result(block: InputBlock, path: str) -> ToolMessage:
    content = block.content
    text = "" if content is None or isinstance(content, UnsetType) else _text(content, f"{path}.content")
    if value_or_none(block.is_error):
        text = ERROR_PREFIX + text
    return ToolMessage(content=text, tool_call_id=required(block.tool_use_id, f"{path}.tool_use_id"))


def _text(content: str | Sequence[TextInput], path: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for index, block in enumerate(content):
        if block.type != "text":
            raise _unsupported_block(block.type, f"{path}[{index}]", "text")
        texts.append(required(block.text, f"{path}[{index}].text"))
    return "\n".join(texts)


def _unsupported_block(kind: str, path: str, allowed: str) -> ApiError:
    return unsupported(f"{path}.type", f"content of type {kind[:80]!r} is not supported yet; allowed: {allowed}")
