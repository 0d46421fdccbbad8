"""Build the grammar of a chat's whole answer: a think block, tool calls that follow their schemas, a requested format.

Calls are in the model's own format, which it was trained to write. If no call is required, the answer may also be text
of the requested format or, without one, any text in which no other call begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple, cast

from tok_client.types import FunctionDefinition, JSONObject
from tok_core.grammar import (
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
from tok_server.openai.chat.allowed_tools import AllowedToolCalls
from tok_server.openai.generation import value_or_none
from tok_server.parsing import NO_MARKUP, CallFormat, Markup, hermes, reasoning
from tok_server.wire import encode, invalid

MAX_TOOL_SCHEMA_BYTES: Final = 256 * 1024
"""Limit of all tool schemas together to which calls are constrained, in bytes of JSON."""
NO_PARAMETERS: JSONObject = {"type": "object", "properties": {}, "additionalProperties": False}


class AnswerFormat(NamedTuple):
    """The form of an answer: its grammar (None: any text) and its markup."""

    grammar: Grammar | None
    markup: Markup


def answer_format(
    allowed_calls: AllowedToolCalls, markup: Markup, requested: Grammar | None = None, field: str = "response_format"
) -> AnswerFormat:
    """Combine the allowed tool calls with a requested grammar. Errors: ApiError for what no grammar can express.

    requested  grammar of the content, which follows the think block if no tool is called
    field      name of the request field that asks for it
    """
    if requested is not None and allowed_calls.required:
        raise invalid(field, f"{field} sets a format, but tool_choice requires a call; allowed: one of them")
    strict = any(value_or_none(function.strict) for function in allowed_calls.allowed.values())
    constrained = requested is not None or (markup.calls is not None and (allowed_calls.required or strict))
    if not constrained or not markup:
        return AnswerFormat(requested, markup)
    if requested is not None and requested.kind == "ebnf":
        if markup.calls is not None:
            raise invalid(field, f"{field} is an EBNF grammar; allowed together with tools: JSON, a regex, a choice")
        return AnswerFormat(requested, NO_MARKUP)  # EBNF rules describe the whole answer
    rules = Rules()
    answer = _answer(allowed_calls, markup.calls, _content_rule(requested, field, rules) if requested else None, rules)
    if markup.reasoning:
        answer = sequence([_think_block(markup.thinking, rules), answer])
    return AnswerFormat(Grammar(kind="ebnf", value=rules.text(answer)), markup)


def _content_rule(requested: Grammar, field: str, rules: Rules) -> str:
    try:
        return expression(requested, rules)
    except (Unsupported, RecursionError) as error:
        raise invalid(field, f"{field} cannot be enforced; allowed: {error}") from error


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
    one = rules.either(
        [
            _call_rule(function, index, call_format, rules)
            for index, function in enumerate(allowed_calls.allowed.values())
        ]
    )
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
        path = f"tools[{index}].function.parameters"
        raise invalid(path, f"{path} ({function.name}) cannot be enforced; allowed: {error}") from error
    return sequence([literal(f'{{"name": "{function.name}", "{member}": '), arguments, literal("}")])


def _object(schema: Mapping[str, object]) -> JSONObject:
    """Add type "object" to a schema without a type: arguments are always an object."""
    return dict(schema) if "type" in schema or "$ref" in schema else {**schema, "type": "object"}


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
