"""Build the expressions for objects from the keywords of a JSON Schema.

Properties come in the order in which the schema names them, and optional ones may be left out. Further properties
follow.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from tok_core.grammar.json_schema.arrays import COMMA, Value, between
from tok_core.grammar.json_schema.keywords import Json, Schema, properties_of, required_by
from tok_core.grammar.json_schema.patterns import NamePatterns, is_any
from tok_core.grammar.json_schema.scalars import size
from tok_core.grammar.json_schema.strings import dumps, other_than, string
from tok_core.grammar.regex import Unsatisfiable, Unsupported
from tok_core.grammar.rules import NOTHING, Rules, literal, sequence

COLON: Final = literal(": ")


class _Property(NamedTuple):
    pair: str  # the expression for its name and its value
    required: bool


def object_of(schema: Schema, path: str, value: Value, rules: Rules) -> str:
    """Return the expression for an object. Raise Unsupported if a keyword cannot be expressed."""
    named, required = properties_of(schema, path), required_by(schema, path)
    patterns = NamePatterns(schema, path, rules)
    allowed: Json = not any(one is not False for one in named.values())
    further, free = schema.get("additionalProperties", allowed), schema.get("additionalProperties", True)
    names = [*named, *sorted(required - named.keys())]
    found = []
    for name in names:
        one = patterns.demanded(name, [named[name]] if name in named else [], free)
        pair = _pair(literal(dumps(name)), one, f"{path}.{name[:80]}", value)
        if pair is not None:
            found.append(_Property(pair, name in required))
        elif name in required:
            raise Unsatisfiable(f"schemas under which something is valid ({name[:80]!r} is required and not allowed)")
    pairs = _further(names, further, patterns, path, value, rules)
    least, most = size(schema, "minProperties") or 0, size(schema, "maxProperties")
    if most is not None and most < least:
        raise Unsatisfiable("schemas under which something is valid: minProperties is above maxProperties")
    if not found and pairs and least <= 1:
        return sequence([literal("{"), between(rules.either(pairs), least, most, rules), literal("}")])
    if least > len(required) or (most is not None and (most < len(found) or pairs)):
        raise Unsupported("minProperties and maxProperties where no properties are named, minProperties being 0 or 1")
    return sequence([literal("{"), _properties(found, rules.either(pairs or [NOTHING]), rules), literal("}")])


def _further(
    names: list[str], further: Json, patterns: NamePatterns, path: str, value: Value, rules: Rules
) -> list[str]:
    """Return expressions for the properties that are not named.

    With `patternProperties`, these match a pattern; without, they have any other name.
    """
    if patterns.schemas:
        if further is not False and not is_any(further):
            raise Unsupported(f"additionalProperties beside patternProperties as true or false (at {path})")
        made = [
            _pair(name, patterns.schemas[pattern], f"{path}./{pattern[:80]}/", value)
            for pattern, name in patterns.names(names)
        ]
        return [pair for pair in made if pair is not None]
    if further is False:
        return []
    name = other_than(names, rules) if names else string(0, None, rules)
    pair = _pair(name, further, f"{path}.*", value)
    return [] if pair is None else [pair]


def _pair(name: str, schema: Json, path: str, value: Value) -> str | None:
    """Return the expression for a name and its value; None if no value is valid."""
    try:
        return None if schema is False else sequence([name, COLON, value(schema, path)])
    except Unsatisfiable:
        return None


def _properties(found: list[_Property], further: str, rules: Rules) -> str:
    """Return the expression for the text between the braces.

    It is built from its end: `follows` is what may follow a property, and `first` what may come first.
    """
    follows = rules.repeat(sequence([COMMA, further]), 0, None) if further != NOTHING else NOTHING
    first = NOTHING if further == NOTHING else rules.maybe(sequence([further, follows]))
    for pair, required in reversed(found):
        after, alone = sequence([COMMA, pair, follows]), sequence([pair, follows])
        if required:
            follows, first = rules.rule(after), rules.rule(alone)
        else:
            follows, first = rules.either([after, follows]), rules.either([alone, first])
    return first
