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
from tok_server.openai.generation import value_or_none
from tok_server.wire import ApiError, invalid

MAX_TOOLS = 1024
_FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}", re.ASCII)


@dataclass(frozen=True, slots=True)
class AllowedToolCalls:
    """The tools that the model may call.

    template_tools  the tools as chat templates take them; empty: none are offered
    allowed         tools that may be called, by name
    required        an answer must hold at least one call
    parallel        an answer may hold more than one call
    """

    template_tools: Sequence[Mapping[str, object]] = ()
    allowed: Mapping[str, FunctionDefinition] = field(default_factory=dict)
    required: bool = False
    parallel: bool = True


def allowed_tool_calls(request: ChatCompletionRequest) -> AllowedToolCalls:
    """Return the request's offer. Errors: ApiError naming the refused field ("tools[1].function.name")."""
    tools = _functions(request)
    choice = value_or_none(request.tool_choice)
    if choice == "none" or not tools:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice", "tool_choice requires a call, but tools is empty; allowed: none, auto")
        return AllowedToolCalls()
    allowed, required = _resolve_tool_choice(choice, tools)
    return AllowedToolCalls(
        template_tools=[msgspec.to_builtins(tool) for tool in value_or_none(request.tools) or ()],
        allowed=allowed,
        required=required,
        parallel=value_or_none(request.parallel_tool_calls) is not False,
    )


def _functions(request: ChatCompletionRequest) -> dict[str, FunctionDefinition]:
    functions: dict[str, FunctionDefinition] = {}
    tools = value_or_none(request.tools) or []
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"tools has {len(tools)} entries; allowed: at most {MAX_TOOLS}")
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        if not isinstance(tool, FunctionTool):
            raise _unsupported(f"{path}.type", "type 'custom' is not supported yet; allowed: function")
        name = tool.function.name
        if not _FUNCTION_NAME.fullmatch(name):
            allowed = "1 to 128 letters, digits and any of _.:/- in ASCII"
            raise invalid(f"{path}.function.name", f"{path}.function.name is {name[:200]!r}; allowed: {allowed}")
        if name in functions:
            raise invalid(
                f"{path}.function.name",
                f"{path}.function.name is {name!r}, the name of an earlier tool; allowed: unique names",
            )
        functions[name] = tool.function
    return functions


def _resolve_tool_choice(
    choice: object, tools: Mapping[str, FunctionDefinition]
) -> tuple[Mapping[str, FunctionDefinition], bool]:
    """Return the tools that may be called, and whether a call is required."""
    match choice:
        case None | "auto":
            return tools, False
        case "required":
            return tools, True
        case NamedFunction(function=named):
            return _select_tools([named.name], "tool_choice.function.name", tools), True
        case AllowedTools(allowed_tools=subset):
            path = "tool_choice.allowed_tools.tools"
            names = [_tool_name(tool, f"{path}[{index}]") for index, tool in enumerate(subset.tools)]
            if not names:
                raise invalid(path, f"{path} is []; allowed: at least one tool")
            return _select_tools(names, path, tools), subset.mode == "required"
        case _:
            raise _unsupported("tool_choice.type", "tool_choice of type 'custom' is not supported yet")


def _tool_name(tool: JSONObject, path: str) -> str:
    """Return the name in `{"type": …, "function": {"name": …}}` or, from newer clients, `{"type": …, "name": …}`."""
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else tool.get("name")
    if not isinstance(name, str):
        raise invalid(path, f"{path} has no function name; allowed: an object as in tools")
    return name


def _select_tools(
    names: Sequence[str], path: str, tools: Mapping[str, FunctionDefinition]
) -> Mapping[str, FunctionDefinition]:
    for name in names:
        if name not in tools:
            raise invalid(path, f"{path}: {name[:200]!r} is not in tools; allowed: {', '.join(tools)}")
    return {name: tools[name] for name in names}


def _unsupported(path: str, message: str) -> ApiError:
    return invalid(path, f"{path}: {message}", "unsupported_parameter")
