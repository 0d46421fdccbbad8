"""The tools of a chat request: functions that the model may call, and the choice between them."""

from __future__ import annotations

from typing import ClassVar, Literal

from tok_client.types.base import UNSET, JSONObject, Maybe, Wire


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
