"""Negate schemas by De Morgan's laws, one level at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tok_core.grammar.json_schema.keywords import (
    TYPES,
    Json,
    Schema,
    kinds,
    listed_values,
    properties_of,
    required_by,
    schemas_of,
)
from tok_core.grammar.json_schema.scalars import limit, size
from tok_core.grammar.regex import Unsupported


def negated(schema: Schema, path: str) -> list[Json]:
    """Return the alternatives that together negate a schema; each excludes all values that are valid under the schema.

    The schema comes from `constraints` and has no `$ref`. The negation of "integer" leaves out numbers with a fraction.
    Raise Unsupported, naming a keyword that has no opposite.
    """
    found: list[Json] = []
    for name in schema:
        if name not in _OPPOSITES:
            raise Unsupported(f"'not' and 'if' about schemas without {name!r} (at {path})")
        if name != "const" or "enum" not in schema:  # `enum` covers both
            found += _OPPOSITES[name](schema, name, path)
    return found


def _values(schema: Schema, name: str, path: str) -> list[Json]:
    return [{"not": {"enum": listed_values(schema, path)}}]


def _types(schema: Schema, name: str, path: str) -> list[Json]:
    named = kinds(schema, path)
    left = set(TYPES) - named - {"integer"} - ({"number"} if "integer" in named else set())
    return [{"type": list[Json](sorted(left))}]


def _properties(schema: Schema, name: str, path: str) -> list[Json]:
    named = properties_of(schema, path).items()
    return [{"type": "object", "required": [key], "properties": {key: {"not": value}}} for key, value in named]


def _required(schema: Schema, name: str, path: str) -> list[Json]:
    return [{"type": "object", "properties": {key: False}} for key in sorted(required_by(schema, path))]


def _all(schema: Schema, name: str, path: str) -> list[Json]:
    return [{"not": one} for one in schemas_of(schema, name, path)]


def _any(schema: Schema, name: str, path: str) -> list[Json]:
    return [{"allOf": _all(schema, name, path)}]


def _not(schema: Schema, name: str, path: str) -> list[Json]:
    return [schema[name]]


def _number(opposite: str) -> Opposite:
    def found(schema: Schema, name: str, path: str) -> list[Json]:
        limit(schema, name)
        return [{"type": "number", opposite: schema[name]}]

    return found


def _size(kind: str, opposite: str, step: int) -> Opposite:
    def found(schema: Schema, name: str, path: str) -> list[Json]:
        value = (size(schema, name) or 0) + step
        return [{"type": kind, opposite: value}] if value >= 0 else []

    return found


Opposite = Callable[[Schema, str, str], list[Json]]
_OPPOSITES: Final[dict[str, Opposite]] = {
    "enum": _values,
    "const": _values,
    "type": _types,
    "properties": _properties,
    "required": _required,
    "allOf": _all,
    "anyOf": _any,
    "not": _not,
    "minimum": _number("exclusiveMaximum"),
    "exclusiveMinimum": _number("maximum"),
    "maximum": _number("exclusiveMinimum"),
    "exclusiveMaximum": _number("minimum"),
    "minLength": _size("string", "maxLength", -1),
    "maxLength": _size("string", "minLength", 1),
    "minItems": _size("array", "maxItems", -1),
    "maxItems": _size("array", "minItems", 1),
}
