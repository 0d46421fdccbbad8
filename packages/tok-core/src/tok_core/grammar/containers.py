"""Objects and arrays under the keywords of a JSON Schema, as expressions.

Properties come in the order in which they are named, each that is not required or left out; after them further ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from tok_core.grammar.characters import Unsupported
from tok_core.grammar.keywords import Json, Schema, properties_of, required_by
from tok_core.grammar.rules import NOTHING, Rules, literal, sequence
from tok_core.grammar.scalars import size
from tok_core.grammar.strings import dumps, other_than, string

COMMA: Final = literal(", ")
COLON: Final = literal(": ")

Value = Callable[[Json, str], str]
"""The expression for what is valid under a schema, which stands at a path."""


class _Property(NamedTuple):
    pair: str  # the expression for its name and its value
    required: bool


def object_of(schema: Schema, path: str, value: Value, rules: Rules) -> str:
    """An object. Errors: Unsupported."""
    named, required = properties_of(schema, path), required_by(schema, path)
    further = schema.get("additionalProperties", not named)
    schemas = {**named, **{name: further for name in required if name not in named}}
    found = []
    for name, one in schemas.items():
        if one is not False:
            pair = sequence([literal(dumps(name)), COLON, value(one, f"{path}.{name[:80]}")])
            found.append(_Property(pair, name in required))
        elif name in required:
            raise Unsupported(f"schemas under which something is valid ({name[:80]!r} is required and not allowed)")
    least, most = size(schema, "minProperties") or 0, size(schema, "maxProperties")
    if not schemas and further is not False and least <= 1:
        pair = sequence([string(0, None, rules), COLON, value(further, f"{path}.*")])
        return sequence([literal("{"), _list(pair, least, most, rules), literal("}")])
    if least > len(required) or (most is not None and (most < len(found) or further is not False)):
        raise Unsupported("minProperties and maxProperties where no properties are named, minProperties being 0 or 1")
    pair = NOTHING
    if further is not False:
        pair = sequence([rules.regular(other_than(list(schemas))), COLON, value(further, f"{path}.*")])
    return sequence([literal("{"), _properties(found, pair, rules), literal("}")])


def array_of(schema: Schema, path: str, value: Value, rules: Rules) -> str:
    """An array. Errors: Unsupported."""
    firsts, rest = schema.get("prefixItems", []), schema.get("items", "prefixItems" not in schema)
    if not isinstance(firsts, list):
        raise Unsupported("prefixItems as a list of schemas")
    least, most = size(schema, "minItems") or 0, size(schema, "maxItems")
    firsts = firsts[: next((index for index, one in enumerate(firsts) if one is False), None)]
    if len(firsts) < len(schema.get("prefixItems", [])):  # type: ignore[arg-type]
        rest = False
    if rest is False:
        most = len(firsts) if most is None else min(most, len(firsts))
    if most is not None and most < least:
        raise Unsupported("schemas under which something is valid: minItems is above maxItems")
    firsts = firsts[:most]
    left = None if most is None else most - len(firsts)
    tail = NOTHING
    if left != 0:
        one = value(rest, f"{path}[]")
        if not firsts:
            return sequence([literal("["), _list(one, least, most, rules), literal("]")])
        tail = rules.repeat(sequence([COMMA, one]), max(0, least - len(firsts)), left)
    for index in reversed(range(len(firsts))):
        comma = COMMA if index else NOTHING
        found = sequence([comma, value(firsts[index], f"{path}[{index}]"), tail])
        tail = found if index < least else rules.maybe(found)
    return sequence([literal("["), tail, literal("]")])


def _list(one: str, least: int, most: int | None, rules: Rules) -> str:
    """So many of them, commas between."""
    if most == 0:
        return NOTHING
    more = rules.repeat(sequence([COMMA, one]), max(0, least - 1), None if most is None else most - 1)
    found = sequence([one, more])
    return found if least else rules.maybe(found)


def _properties(found: list[_Property], further: str, rules: Rules) -> str:
    """What stands between the braces, made from the end: what may follow a property, and what may come first."""
    follows = rules.repeat(sequence([COMMA, further]), 0, None) if further != NOTHING else NOTHING
    first = NOTHING if further == NOTHING else rules.maybe(sequence([further, follows]))
    for pair, required in reversed(found):
        after, alone = sequence([COMMA, pair, follows]), sequence([pair, follows])
        if required:
            follows, first = rules.rule(after), rules.rule(alone)
        else:
            follows, first = rules.either([after, follows]), rules.either([alone, first])
    return first
