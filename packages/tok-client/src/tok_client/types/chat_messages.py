"""The messages and tools of a chat: messages are distinguished by `role`, content parts and tools by `type`."""

from __future__ import annotations

from typing import ClassVar, Literal

from tok_client.types.base import UNSET, JSONObject, Maybe, Wire


class TextPart(Wire, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """A piece of text."""

    type: ClassVar[Literal["text"]] = "text"
    text: str
    prompt_cache_breakpoint: Maybe[JSONObject] = UNSET


class ImagePart(Wire, frozen=True, kw_only=True, tag_field="type", tag="image_url"):
    """An image, by URL."""

    type: ClassVar[Literal["image_url"]] = "image_url"
    image_url: JSONObject
    prompt_cache_breakpoint: Maybe[JSONObject] = UNSET


class AudioPart(Wire, frozen=True, kw_only=True, tag_field="type", tag="input_audio"):
    """Inline audio."""

    type: ClassVar[Literal["input_audio"]] = "input_audio"
    input_audio: JSONObject
    prompt_cache_breakpoint: Maybe[JSONObject] = UNSET


class FilePart(Wire, frozen=True, kw_only=True, tag_field="type", tag="file"):
    """A file, inline or by id."""

    type: ClassVar[Literal["file"]] = "file"
    file: JSONObject
    prompt_cache_breakpoint: Maybe[JSONObject] = UNSET


class RefusalPart(Wire, frozen=True, kw_only=True, tag_field="type", tag="refusal"):
    """A refusal that the assistant gave."""

    type: ClassVar[Literal["refusal"]] = "refusal"
    refusal: str


class FunctionCall(Wire, frozen=True, kw_only=True):
    """A function's name and its arguments as JSON text."""

    name: str
    arguments: str


class CustomCall(Wire, frozen=True, kw_only=True):
    """A custom tool's name and its input."""

    name: str
    input: str


class FunctionToolCall(Wire, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """A call of a function tool."""

    type: ClassVar[Literal["function"]] = "function"
    id: str
    function: FunctionCall


class CustomToolCall(Wire, frozen=True, kw_only=True, tag_field="type", tag="custom"):
    """A call of a custom tool."""

    type: ClassVar[Literal["custom"]] = "custom"
    id: str
    custom: CustomCall


class SystemMessage(Wire, frozen=True, kw_only=True, tag_field="role", tag="system"):
    """Instructions ahead of the conversation."""

    role: ClassVar[Literal["system"]] = "system"
    content: str | list[TextPart]
    name: Maybe[str] = UNSET


class DeveloperMessage(Wire, frozen=True, kw_only=True, tag_field="role", tag="developer"):
    """Instructions ahead of the conversation, under their newer name."""

    role: ClassVar[Literal["developer"]] = "developer"
    content: str | list[TextPart]
    name: Maybe[str] = UNSET


class UserMessage(Wire, frozen=True, kw_only=True, tag_field="role", tag="user"):
    """A message of the user."""

    role: ClassVar[Literal["user"]] = "user"
    content: str | list[TextPart | ImagePart | AudioPart | FilePart]
    name: Maybe[str] = UNSET


class AssistantMessage(Wire, frozen=True, kw_only=True, tag_field="role", tag="assistant"):
    """An answer of the model; without content if it called tools. `reasoning_content` is the reasoning before it."""

    role: ClassVar[Literal["assistant"]] = "assistant"
    content: Maybe[str | list[TextPart | RefusalPart]] = UNSET
    name: Maybe[str] = UNSET
    refusal: Maybe[str] = UNSET
    tool_calls: Maybe[list[FunctionToolCall | CustomToolCall]] = UNSET
    function_call: Maybe[FunctionCall] = UNSET
    audio: Maybe[JSONObject] = UNSET
    reasoning_content: Maybe[str] = UNSET


class ToolMessage(Wire, frozen=True, kw_only=True, tag_field="role", tag="tool"):
    """The result of the tool call `tool_call_id`."""

    role: ClassVar[Literal["tool"]] = "tool"
    content: str | list[TextPart]
    tool_call_id: str


class FunctionMessage(Wire, frozen=True, kw_only=True, tag_field="role", tag="function"):
    """The result of a function call (the deprecated form of a tool message)."""

    role: ClassVar[Literal["function"]] = "function"
    content: str | None
    name: str


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage
ContentPart = TextPart | ImagePart | AudioPart | FilePart | RefusalPart


class FunctionDefinition(Wire, frozen=True, kw_only=True):
    """A function: its name, its description, and the JSON schema of its arguments.

    `strict` requests arguments that always follow the schema.
    """

    name: str
    description: Maybe[str] = UNSET
    parameters: Maybe[JSONObject] = UNSET
    strict: Maybe[bool] = UNSET


class FunctionTool(Wire, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """A function that the model may call."""

    type: ClassVar[Literal["function"]] = "function"
    function: FunctionDefinition


class CustomTool(Wire, frozen=True, kw_only=True, tag_field="type", tag="custom"):
    """A tool whose input is plain text."""

    type: ClassVar[Literal["custom"]] = "custom"
    custom: JSONObject


class FunctionName(Wire, frozen=True, kw_only=True):
    """A function by its name."""

    name: str


class NamedFunction(Wire, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """A tool choice that forces one function."""

    type: ClassVar[Literal["function"]] = "function"
    function: FunctionName


class NamedCustom(Wire, frozen=True, kw_only=True, tag_field="type", tag="custom"):
    """A tool choice that forces one custom tool."""

    type: ClassVar[Literal["custom"]] = "custom"
    custom: FunctionName


class ToolSubset(Wire, frozen=True, kw_only=True):
    """Some of the tools, by name: the model may call them ("auto") or must call one of them ("required")."""

    mode: Literal["auto", "required"]
    tools: list[JSONObject]


class AllowedTools(Wire, frozen=True, kw_only=True, tag_field="type", tag="allowed_tools"):
    """A tool choice among some of the tools."""

    type: ClassVar[Literal["allowed_tools"]] = "allowed_tools"
    allowed_tools: ToolSubset


Tool = FunctionTool | CustomTool
ToolChoice = Literal["none", "auto", "required"] | NamedFunction | NamedCustom | AllowedTools
