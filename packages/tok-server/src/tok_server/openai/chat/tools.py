"""Tools of a chat: those that the model may call, and the grammar of an answer that may or must call them.

The grammar describes the whole answer: a think block, tool calls that follow their schemas, a requested format. Calls
are in the model's own format, which it was trained to write. If no call is required, the answer may also be text of the
requested format or, without one, any text in which no other call begins.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, cast

import msgspec

from tok_client.types import (
    AllowedTools,
    ChatCompletionRequest,
    FunctionDefinition,
    FunctionTool,
    JSONObject,
    NamedFunction,
)
from tok_core import InvalidField
from tok_core.grammar import (
    ENDLESS,
    NOTHING,
    Json,
    Rules,
    SchemaRules,
    Unsupported,
    complement,
    expression,
    literal,
    one_of,
    regular,
    sequence,
)
from tok_core.sampling_params import Grammar
from tok_server.openai.generation import value_or_none
from tok_server.parsing import NO_MARKUP, CallFormat, Markup, hermes, reasoning
from tok_server.wire import ApiError, encode, invalid, unsupported

MAX_TOOLS = 1024
_FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}", re.ASCII)

MAX_TOOL_SCHEMA_BYTES: Final = 256 * 1024
"""Limit of all tool schemas together to which calls are constrained, in bytes of JSON."""
MAX_TOOL_RULE_WORK: Final = 500_000
"""Limit of the steps that build an answer's rules: 0.2 to 0.7 s, in which all other requests share the GIL."""
NO_PARAMETERS: JSONObject = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class AllowedToolCalls:
    """The tools that the model may call.

    template_tools  the tools as chat templates take them; empty: none are offered
    allowed         tools that may be called, by name
    index           position of each tool in the request, by name
    required        an answer must hold at least one call
    parallel        an answer may hold more than one call; never if tool_choice names a function, as in OpenAI's API
    """

    template_tools: Sequence[Mapping[str, object]] = ()
    allowed: Mapping[str, FunctionDefinition] = field(default_factory=dict)
    index: Mapping[str, int] = field(default_factory=dict)
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
        index={name: index for index, name in enumerate(tools)},
        required=required,
        parallel=value_or_none(request.parallel_tool_calls) is not False and not isinstance(choice, NamedFunction),
    )


def _functions(request: ChatCompletionRequest) -> dict[str, FunctionDefinition]:
    functions: dict[str, FunctionDefinition] = {}
    tools = value_or_none(request.tools) or []
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"tools has {len(tools)} entries; allowed: at most {MAX_TOOLS}")
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        if not isinstance(tool, FunctionTool):
            raise unsupported(f"{path}.type", "type 'custom' is not supported yet; allowed: function")
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
            raise unsupported("tool_choice.type", "tool_choice of type 'custom' is not supported yet")


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


class AnswerFormat(NamedTuple):
    """The form of an answer: its grammar (None: any text) and its markup."""

    grammar: Grammar | None
    markup: Markup


def answer_format(
    allowed_calls: AllowedToolCalls, markup: Markup, requested: Grammar | None = None, field: str = "response_format"
) -> AnswerFormat:
    """Combine the allowed tool calls with a requested grammar. Errors: ApiError for what no grammar can express.

    requested  grammar of the content, which follows the think block if no tool is called; an answer that must be a
               call has no content
    field      name of the request field that asks for it
    """
    strict = any(value_or_none(function.strict) for function in allowed_calls.allowed.values())
    constrained = requested is not None or (markup.calls is not None and (allowed_calls.required or strict))
    if not constrained or not markup:
        return AnswerFormat(requested, markup)
    if requested is not None and requested.kind in ("ebnf", "lark"):
        if markup.calls is not None:
            what = "an EBNF grammar" if requested.kind == "ebnf" else "a Lark grammar"
            raise invalid(field, f"{field} is {what}; allowed together with tools: JSON, a regex, a choice")
        return AnswerFormat(requested, NO_MARKUP)  # these rules describe the whole answer
    rules = Rules(MAX_TOOL_RULE_WORK)
    content = None if allowed_calls.required else requested
    content_rule = _content_rule(content, field, rules) if content else None
    answer = _answer(allowed_calls, markup.calls, content_rule, rules)
    if markup.reasoning:
        answer = sequence([_think_block(markup.thinking, rules), answer])
    try:
        return AnswerFormat(Grammar(kind="ebnf", value=rules.text(answer)), markup)
    except InvalidField as error:  # the rules are too long
        name = "tools" if markup.calls is not None else field
        raise invalid(name, f"{name} cannot be enforced: {error}") from error


def _content_rule(requested: Grammar, field: str, rules: Rules) -> str:
    try:
        content = expression(requested, rules)
        if rules.endless([content])[0]:
            raise Unsupported(ENDLESS)
    except (Unsupported, RecursionError) as error:
        raise invalid(field, f"{field} cannot be enforced; allowed: {error}") from error
    return content


def _answer(
    allowed_calls: AllowedToolCalls, call_format: CallFormat | None, content_rule: str | None, rules: Rules
) -> str:
    if call_format is None:
        return content_rule or NOTHING
    calls = _calls_rule(allowed_calls, call_format, rules)
    if allowed_calls.required:
        return calls
    if content_rule is not None:
        return rules.either([calls, content_rule])
    if call_format == "hermes":
        return sequence([rules.regular(_text_without(hermes.OPEN)), rules.maybe(calls)])
    return rules.either([calls, rules.regular(_text_without_call_lines())])


def _calls_rule(allowed_calls: AllowedToolCalls, call_format: CallFormat, rules: Rules) -> str:
    """Return an expression of one call or, if the offer is parallel, of several in a row."""
    size = sum(
        len(encode(function.parameters))
        for function in allowed_calls.allowed.values()
        if value_or_none(function.parameters)
    )
    if size > MAX_TOOL_SCHEMA_BYTES:
        raise invalid(
            "tools", f"tools have {size} bytes of parameters; allowed: at most {MAX_TOOL_SCHEMA_BYTES} together"
        )
    functions = [(function, allowed_calls.index[name]) for name, function in allowed_calls.allowed.items()]
    each = [_call_rule(function, index, call_format, rules) for function, index in functions]
    for (function, index), endless in zip(functions, rules.endless(each), strict=True):
        if endless:
            raise _unenforced(function, index, ENDLESS)
    one = rules.either(each)
    if call_format == "hermes":
        one = sequence([literal(f"{hermes.OPEN}\n"), one, literal(f"\n{hermes.CLOSE}")])
    if not allowed_calls.parallel:
        return one
    separator = "\n" if call_format == "hermes" else "; "
    return sequence([one, rules.repeat(sequence([literal(separator), one]), 0, None)])


def _call_rule(function: FunctionDefinition, index: int, call_format: CallFormat, rules: Rules) -> str:
    member = "arguments" if call_format == "hermes" else "parameters"
    schema = value_or_none(function.parameters)
    try:
        whole = cast(Json, _object(NO_PARAMETERS if schema is None else schema))
        arguments = SchemaRules(whole, rules).root()
    except (Unsupported, RecursionError) as error:
        raise _unenforced(function, index, str(error)) from error
    return sequence([literal(f'{{"name": "{function.name}", "{member}": '), arguments, literal("}")])


def _unenforced(function: FunctionDefinition, index: int, allowed: str) -> ApiError:
    path = f"tools[{index}].function.parameters"
    return invalid(path, f"{path} ({function.name}) cannot be enforced; allowed: {allowed}")


def _object(schema: Mapping[str, object]) -> JSONObject:
    """Restrict a schema to objects, which arguments always are. Raise Unsupported if its type allows none."""
    types = schema.get("type", "object")
    if types != "object" and not (isinstance(types, list) and "object" in types):
        raise Unsupported('the type "object" (at $)')
    return {**schema, "type": "object"}


def _think_block(thinking: bool, rules: Rules) -> str:
    """Return an expression of a think block, which is optional unless the prompt has opened it."""
    inside = sequence([rules.regular(_text_without(reasoning.THINK_CLOSE)), literal(f"{reasoning.THINK_CLOSE}\n\n")])
    return inside if thinking else rules.maybe(sequence([literal(reasoning.THINK_OPEN), inside]))


def _text_without(mark: str) -> str:
    """Return a regular expression of any text without `mark`, which must hold its first character only once.

    Each "<" begins a proper prefix of the mark, which ends before the mark's next character. For the mark "<t>":

        [^<]*(<([^<t][^<]*)?|<t([^<>][^<]*)?)*
    """
    first = mark[0]
    rest = regular.repeat(_any_except(first), 0, None)
    partial_marks = [
        regular.literal(mark[:size]) + regular.maybe(_any_except(first + mark[size]) + rest)
        for size in range(1, len(mark))
    ]
    return rest + regular.repeat(regular.either(partial_marks), 0, None)


def _text_without_call_lines() -> str:
    """Return a regular expression of any text without a line that may begin a call of Llama."""
    indent = regular.repeat(regular.characters(one_of(" \t")), 0, None)
    line = indent + regular.maybe(_any_except("{<\n\t ") + regular.repeat(_any_except("\n"), 0, None))
    return line + regular.repeat(regular.literal("\n") + line, 0, None)


def _any_except(text: str) -> str:
    return regular.characters(complement(one_of(text)))
