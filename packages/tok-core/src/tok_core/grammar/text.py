"""Convert any grammar that a request may specify to text that xgrammar reads: EBNF, or Lark as it is."""

from __future__ import annotations

import json
from typing import Never, assert_never

from tok_core.grammar.json_schema import Json, SchemaRules
from tok_core.grammar.regex import Unsupported, characters, regex
from tok_core.grammar.rules import Rules, literal, sequence
from tok_core.sampling_params import Grammar

MAX_CHOICES = 10_000
STEPS_PER_CHAR = 5  # of `Rules.work`, to parse a regular expression
ENDLESS = "schemas with a value that ends; every value of this one holds another without end"


def rules_of(grammar: Grammar) -> str:
    """Return the rules; `root` (Lark: `start`) is the whole text. Raise Unsupported, which says what is allowed."""
    try:
        return _rules_of(grammar)
    except RecursionError:
        raise Unsupported("what is nested less deeply") from None


def _rules_of(grammar: Grammar) -> str:
    rules = Rules()
    if grammar.kind in ("ebnf", "lark"):
        if grammar.prefix or grammar.suffix:
            raise Unsupported("rules that say themselves what stands before and after (prefix and suffix)")
        if grammar.kind == "lark" and "%json" in grammar.value:  # xgrammar enforces less of a schema than "json_schema"
            raise Unsupported("Lark rules without %json; JSON schemas are grammars of their own")
        return grammar.value
    body = expression(grammar, rules)
    if rules.endless([body])[0]:
        raise Unsupported(ENDLESS)
    return rules.text(sequence([literal(grammar.prefix), body, literal(grammar.suffix)]))


def expression(grammar: Grammar, rules: Rules) -> str:
    """Return the grammar's value as an expression of `rules`; not for "ebnf" and "lark". Raise Unsupported."""
    match grammar.kind:
        case "json_object":
            return SchemaRules({"type": "object"}, rules).root()
        case "json_schema":
            return SchemaRules(_json(grammar.value), rules).root()
        case "regex":
            rules.work(STEPS_PER_CHAR * len(grammar.value))
            return rules.regular(regex(grammar.value, characters))
        case "choice":
            return rules.either(map(literal, _choices(grammar.value)))
        case "ebnf" | "lark":
            raise AssertionError("rules are taken as they are")
        case _:
            assert_never(grammar.kind)


def _choices(value: str) -> list[str]:
    found = _json(value)
    if not isinstance(found, list) or not 1 <= len(found) <= MAX_CHOICES:
        raise Unsupported(f"a list of 1 to {MAX_CHOICES} texts")
    texts = [one for one in found if isinstance(one, str) and one]
    if len(texts) < len(found):
        raise Unsupported("texts that are not empty")
    return texts


def _json(value: str) -> Json:
    def refuse(name: str) -> Never:
        raise Unsupported(f"JSON, which has no {name}")

    try:
        found: Json = json.loads(value, parse_constant=refuse)
    except Unsupported:
        raise
    except ValueError as error:
        raise Unsupported(f"JSON ({error})") from None
    return found
