"""Convert any grammar that a request may specify to EBNF text in xgrammar's dialect."""

from __future__ import annotations

import json
from typing import Never, assert_never

from tok_core.grammar.json_schema import Json, SchemaRules
from tok_core.grammar.regex import Unsupported, characters, regex
from tok_core.grammar.rules import Rules, literal, sequence
from tok_core.sampling_params import Grammar

MAX_CHOICES = 10_000
ROOT = "root"


def ebnf(grammar: Grammar) -> str:
    """Return the grammar's rules; `root` is the whole text. Raise Unsupported, whose message says what is allowed."""
    try:
        return _ebnf(grammar)
    except RecursionError:
        raise Unsupported("what is nested less deeply") from None


def _ebnf(grammar: Grammar) -> str:
    rules = Rules()
    if grammar.kind == "ebnf":
        if grammar.prefix or grammar.suffix:
            raise Unsupported("rules that say themselves what stands before and after (prefix and suffix)")
        return grammar.value
    body = expression(grammar, rules)
    return rules.text(sequence([literal(grammar.prefix), body, literal(grammar.suffix)]))


def expression(grammar: Grammar, rules: Rules) -> str:
    """Return the grammar's value as an expression of `rules`; not for kind "ebnf". Raise Unsupported."""
    match grammar.kind:
        case "json_object":
            return SchemaRules({"type": "object"}, rules).root()
        case "json_schema":
            return SchemaRules(_json(grammar.value), rules).root()
        case "regex":
            return rules.regular(regex(grammar.value, characters))
        case "choice":
            return rules.either(map(literal, _choices(grammar.value)))
        case "ebnf":
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
