"""The tools of a chat request: what the model may call, and whether it shall."""

from __future__ import annotations

from typing import ClassVar, Literal

from tok_client.types.base import UNSET, JSONObject, Maybe, Wire


class FunctionDefinition(Wire, frozen=True, kw_only=True):
    """A function: its name, what it does, and the JSON schema of its arguments.

    `strict` asks for arguments that follow the schema in any case.
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
    """The choice of one function."""

    type: ClassVar[Literal["function"]] = "function"
    function: FunctionName


class NamedCustom(Wire, frozen=True, kw_only=True, tag_field="type", tag="custom"):
    """The choice of one custom tool."""

    type: ClassVar[Literal["custom"]] = "custom"
    custom: FunctionName


class ToolSubset(Wire, frozen=True, kw_only=True):
    """Some of the tools, by name: the model may call them ("auto") or calls one of them ("required")."""

    mode: Literal["auto", "required"]
    tools: list[JSONObject]


class AllowedTools(Wire, frozen=True, kw_only=True, tag_field="type", tag="allowed_tools"):
    """The choice among some of the tools."""

    type: ClassVar[Literal["allowed_tools"]] = "allowed_tools"
    allowed_tools: ToolSubset


Tool = FunctionTool | CustomTool
ToolChoice = Literal["none", "auto", "required"] | NamedFunction | NamedCustom | AllowedTools
