"""Read which tools the client lets the model call: `tools`, `tool_choice` and `parallel_tool_calls`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from tok_client.types import (
    AllowedTools,
    ChatCompletionRequest,
    FunctionDefinition,
    FunctionTool,
    JSONObject,
    NamedFunction,
)
from tok_server.openai.generation import given
from tok_server.wire import ApiError, invalid

MAX_TOOLS = 1024
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}", re.ASCII)


@dataclass(frozen=True, slots=True)
class AllowedToolCalls:
    """The tools that the model may call.

    shown     the tools as chat templates take them; empty: none are offered
    allowed   tools that may be called, by name
    required  an answer must hold at least one call
    parallel  an answer may hold more than one call
    """

    shown: Sequence[Mapping[str, object]] = ()
    allowed: Mapping[str, FunctionDefinition] = field(default_factory=dict)
    required: bool = False
    parallel: bool = True


def offer(request: ChatCompletionRequest) -> AllowedToolCalls:
    """Return the request's offer. Errors: ApiError naming the refused field ("tools[1].function.name")."""
    tools = _functions(request)
    choice = given(request.tool_choice)
    if choice == "none" or not tools:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice", "tool_choice asks for a call, but there are no tools; allowed: none, auto")
        return AllowedToolCalls()
    allowed, required = _chosen(choice, tools)
    return AllowedToolCalls(
        shown=[msgspec.to_builtins(tool) for tool in given(request.tools) or ()],
        allowed=allowed,
        required=required,
        parallel=given(request.parallel_tool_calls) is not False,
    )


def _functions(request: ChatCompletionRequest) -> dict[str, FunctionDefinition]:
    found: dict[str, FunctionDefinition] = {}
    tools = given(request.tools) or []
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"tools has {len(tools)} entries; allowed: at most {MAX_TOOLS}")
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        if not isinstance(tool, FunctionTool):
            raise _unsupported(f"{path}.type", "type 'custom' is not supported yet; allowed: function")
        name = tool.function.name
        if not _NAME.fullmatch(name):
            allowed = "1 to 128 letters, digits and any of _.:/- in ASCII"
            raise invalid(f"{path}.function.name", f"{path}.function.name is {name[:200]!r}; allowed: {allowed}")
        if name in found:
            raise invalid(f"{path}.function.name", f"{path}.function.name is {name!r} a second time")
        found[name] = tool.function
    return found


def _chosen(choice: object, tools: Mapping[str, FunctionDefinition]) -> tuple[Mapping[str, FunctionDefinition], bool]:
    """Return the tools that may be called, and whether a call is required."""
    match choice:
        case None | "auto":
            return tools, False
        case "required":
            return tools, True
        case NamedFunction(function=named):
            return _some([named.name], "tool_choice.function.name", tools), True
        case AllowedTools(allowed_tools=subset):
            path = "tool_choice.allowed_tools.tools"
            names = [_name_of(tool, f"{path}[{index}]") for index, tool in enumerate(subset.tools)]
            if not names:
                raise invalid(path, f"{path} is []; allowed: at least one tool")
            return _some(names, path, tools), subset.mode == "required"
        case _:
            raise _unsupported("tool_choice.type", "tool_choice of type 'custom' is not supported yet")


def _name_of(tool: JSONObject, path: str) -> str:
    """Return the name in `{"type": …, "function": {"name": …}}` or, from newer clients, `{"type": …, "name": …}`."""
    inner = tool.get("function")
    name = inner.get("name") if isinstance(inner, dict) else tool.get("name")
    if not isinstance(name, str):
        raise invalid(path, f"{path} names no function; allowed: an object such as in tools")
    return name


def _some(names: Sequence[str], path: str, tools: Mapping[str, FunctionDefinition]) -> Mapping[str, FunctionDefinition]:
    for name in names:
        if name not in tools:
            raise invalid(path, f"{path}: {name[:200]!r} is none of tools; allowed: {', '.join(tools)}")
    return {name: tools[name] for name in names}


def _unsupported(path: str, message: str) -> ApiError:
    return invalid(path, f"{path}: {message}", "unsupported_parameter")
