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
from tok_server.openai.chat.tool_offer import AllowedToolCalls
from tok_server.openai.generation import given
from tok_server.parsing import NO_MARKUP, CallFormat, Markup, hermes, reasoning
from tok_server.wire import encode, invalid

MAX_TOOL_SCHEMA_BYTES: Final = 256 * 1024
"""Limit of all tool schemas together to which calls are constrained, in bytes of JSON."""
NO_PARAMETERS: JSONObject = {"type": "object", "properties": {}, "additionalProperties": False}


class AnswerShape(NamedTuple):
    """The form of an answer: its grammar (None: any text) and its markup."""

    grammar: Grammar | None
    markup: Markup


def answer_shape(
    offer: AllowedToolCalls, markup: Markup, asked: Grammar | None = None, field: str = "response_format"
) -> AnswerShape:
    """Combine the tool offer with the requested grammar `asked`. Errors: ApiError for what no grammar can express.

    asked  grammar of the content, which follows the think block if no tool is called
    field  name of the request field that asks for it
    """
    if asked is not None and offer.required:
        raise invalid(field, f"{field} asks for a format; with tool_choice that requires a call: none")
    strict = any(given(function.strict) for function in offer.allowed.values())
    constrained = asked is not None or (markup.calls is not None and (offer.required or strict))
    if not constrained or not markup:
        return AnswerShape(asked, markup)
    if asked is not None and asked.kind == "ebnf":
        if markup.calls is not None:
            raise invalid(field, f"{field} asks for rules (EBNF); with tools allowed: JSON, a regex, a choice")
        return AnswerShape(asked, NO_MARKUP)  # EBNF rules describe the whole answer
    rules = Rules()
    answer = _answer(offer, markup.calls, _said(asked, field, rules) if asked else None, rules)
    if markup.reasoning:
        answer = sequence([_thoughts(markup.thinking, rules), answer])
    return AnswerShape(Grammar(kind="ebnf", value=rules.text(answer)), markup)


def _said(asked: Grammar, field: str, rules: Rules) -> str:
    try:
        return expression(asked, rules)
    except (Unsupported, RecursionError) as error:
        raise invalid(field, f"{field} cannot be followed; allowed: {error}") from error


def _answer(offer: AllowedToolCalls, kind: CallFormat | None, said: str | None, rules: Rules) -> str:
    if kind is None:
        return said or NOTHING
    calls = _calls(offer, kind, rules)
    if offer.required:
        return calls
    if said is not None:
        return rules.either([calls, said])
    if kind == "hermes":
        return sequence([rules.regular(_without(hermes.OPEN)), rules.maybe(calls)])
    return rules.either([calls, rules.regular(_no_object())])


def _calls(offer: AllowedToolCalls, kind: CallFormat, rules: Rules) -> str:
    """Return an expression of one call or, if the offer is parallel, of several in a row."""
    size = sum(len(encode(function.parameters)) for function in offer.allowed.values() if given(function.parameters))
    if size > MAX_TOOL_SCHEMA_BYTES:
        raise invalid(
            "tools", f"tools have {size} bytes of parameters; allowed: at most {MAX_TOOL_SCHEMA_BYTES} together"
        )
    one = rules.either([_call(function, index, kind, rules) for index, function in enumerate(offer.allowed.values())])
    if kind == "hermes":
        one = sequence([literal(f"{hermes.OPEN}\n"), one, literal(f"\n{hermes.CLOSE}")])
    if not offer.parallel:
        return one
    separator = "\n" if kind == "hermes" else "; "
    return sequence([one, rules.repeat(sequence([literal(separator), one]), 0, None)])


def _call(function: FunctionDefinition, index: int, kind: CallFormat, rules: Rules) -> str:
    named = "arguments" if kind == "hermes" else "parameters"
    schema = given(function.parameters)
    try:
        whole = cast(Json, _object(NO_PARAMETERS if schema is None else schema))
        arguments = SchemaRules(whole, rules).root()
    except (Unsupported, RecursionError) as error:
        path = f"tools[{index}].function.parameters"
        raise invalid(path, f"{path} ({function.name}) cannot be followed; allowed: {error}") from error
    return sequence([literal(f'{{"name": "{function.name}", "{named}": '), arguments, literal("}")])


def _object(schema: Mapping[str, object]) -> JSONObject:
    """Add type "object" to a schema without a type: arguments are always an object."""
    return dict(schema) if "type" in schema or "$ref" in schema else {**schema, "type": "object"}


def _thoughts(thinking: bool, rules: Rules) -> str:
    """Return an expression of a think block, which is optional unless the prompt has opened it."""
    inside = sequence([rules.regular(_without(reasoning.THINK_CLOSE)), literal(f"{reasoning.THINK_CLOSE}\n\n")])
    return inside if thinking else rules.maybe(sequence([literal(reasoning.THINK_OPEN), inside]))


def _without(mark: str) -> str:
    """Return a regular expression of any text without `mark`, which must hold its first character only once.

    Each "<" begins a proper prefix of the mark, which ends before the mark's next character. For the mark "<t>":

        [^<]*(<([^<t][^<]*)?|<t([^<>][^<]*)?)*
    """
    first = mark[0]
    rest = regular.repeat(_none_of(first), 0, None)
    begun = [
        regular.literal(mark[:size]) + regular.maybe(_none_of(first + mark[size]) + rest)
        for size in range(1, len(mark))
    ]
    return rest + regular.repeat(regular.either(begun), 0, None)


def _no_object() -> str:
    """Return a regular expression of any text without a line that may begin a call of Llama."""
    indent = regular.repeat(regular.characters(one_of(" \t")), 0, None)
    line = indent + regular.maybe(_none_of("{<\n\t ") + regular.repeat(_none_of("\n"), 0, None))
    return line + regular.repeat(regular.literal("\n") + line, 0, None)


def _none_of(text: str) -> str:
    return regular.characters(complement(one_of(text)))
