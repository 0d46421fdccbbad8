"""JSON Schema as rules of a grammar: every text of the grammar is valid, and no keyword is passed over.

What the grammar leaves out of what would be valid: spaces other than one after each comma and colon; properties in
another order than they are named in; further properties, where `properties` are named and `additionalProperties` is
not; types that the keywords are not about, where `type` is missing; long numbers (`numbers`), rare formats of strings
(`strings`), and strings of which only a part matches `pattern`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain, combinations
from typing import ParamSpec, TypeVar

from tok_core.grammar.characters import Unsupported
from tok_core.grammar.containers import array_of, object_of
from tok_core.grammar.keywords import (
    TYPES,
    Json,
    Schema,
    both,
    constraints,
    kind_of,
    kinds,
    listed_values,
    properties_of,
    required_by,
    same,
)
from tok_core.grammar.rules import Rules, literal
from tok_core.grammar.scalars import scalar
from tok_core.grammar.strings import dumps

MOST_DEPTH = 64
MOST_OPTIONS = 1000
OF_A_PAIR = 20  # steps at least
COMBINED = ("$ref", "allOf", "anyOf", "oneOf")

P = ParamSpec("P")
T = TypeVar("T")


class SchemaRules:
    """Makes the expressions for the values of `schema` and of what it refers to; equal schemas are made once."""

    def __init__(self, schema: Json, rules: Rules) -> None:
        self._whole = schema
        self._rules = rules
        self._made: dict[str, str] = {}
        self._depth = 0

    def root(self) -> str:
        """The expression for the whole. Errors: Unsupported, saying what and where."""
        return self._value(self._whole, "$")

    def _value(self, schema: Json, path: str) -> str:
        """Any value that is valid under the schema."""
        found = constraints(schema, path)
        if found.keys() == {"$ref"}:
            found = self._resolved(found, path)
        key = json.dumps(found, sort_keys=True)
        self._rules.work(len(key) // 4)
        if key not in self._made:
            self._made[key] = name = self._rules.reserve()
            self._rules.define(name, self._deeper(self._expression, found, path))
        return self._made[key]

    def _expression(self, schema: dict[str, Json], path: str) -> str:
        parts = [part for option in self._options(schema, path) for part in self._of_types(option, path)]
        if not parts:
            raise Unsupported(f"schemas under which something is valid (nothing is at {path})")
        return self._rules.either(parts)

    def _options(self, schema: dict[str, Json], path: str) -> list[dict[str, Json]]:
        """The schema as schemas without references and combinations, one of which has to be valid."""
        name = next((name for name in COMBINED if name in schema), None)
        if name is None:
            return [schema]
        rest = {key: value for key, value in schema.items() if key != name}
        if name == "$ref":
            return self._deeper(self._joined, rest, [self._target(schema["$ref"], path)], path)
        listed = schema[name]
        if not isinstance(listed, list) or not listed:
            raise Unsupported(f"{name} as a list of schemas (at {path})")
        if len(listed) > MOST_OPTIONS:
            raise _too_many(path)
        if name == "allOf":
            return self._deeper(self._joined, rest, listed, path)
        branches = [self._deeper(self._options, constraints(one, path), path) for one in listed]
        if name == "oneOf":
            self._check_disjoint(branches, path)
        found: list[dict[str, Json]] = []
        for option in chain.from_iterable(branches):
            found += self._joined(rest, [option], path)
            if len(found) > MOST_OPTIONS:
                raise _too_many(path)
        return found

    def _joined(self, schema: dict[str, Json], others: list[Json], path: str) -> list[dict[str, Json]]:
        """The options of a schema that has to be valid together with the others."""
        for other in others:
            found = constraints(other, path)
            if "$ref" in schema and "$ref" in found:
                found = self._resolved(found, path)
            self._rules.work(_comparing(schema, found))
            schema = both(schema, found, path)
        return self._options(schema, path)

    def _resolved(self, schema: dict[str, Json], path: str) -> dict[str, Json]:
        """The schema without its reference, unless something else stands beside that."""
        for _ in range(MOST_DEPTH):
            if schema.keys() != {"$ref"}:
                return schema
            schema = constraints(self._target(schema["$ref"], path), path)
        raise Unsupported(f"schemas that do not consist of themselves (at {path})")

    def _target(self, reference: Json, path: str) -> Json:
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise Unsupported(f"$ref within the schema, as #/… (at {path})")
        found = self._whole
        for part in reference.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and name.isascii() and name.isdigit() and int(name) < len(found):
                found = found[int(name)]
            else:
                raise Unsupported(f"$ref to what is there ({reference[:80]!r} at {path} is not)")
        return found

    def _check_disjoint(self, branches: list[list[dict[str, Json]]], path: str) -> None:
        for mine, theirs in combinations(branches, 2):
            if not all(self._disjoint(one, other, path) for one in mine for other in theirs):
                raise Unsupported(f"oneOf of which plainly no two are valid at once (at {path}), or anyOf")

    def _disjoint(self, one: Schema, other: Schema, path: str) -> bool:
        """Whether plainly no value that is written under one is valid under the other: by type, by value, or by a
        property that both require. A schema without `type` holds for types that its keywords are not about."""
        self._rules.work(_comparing(one, other))
        mine, theirs = listed_values(one, path), listed_values(other, path)
        if mine is not None and theirs is not None:
            return not any(same(x, y) for x in mine for y in theirs)
        both_valid = _written(one, path) & _valid(other, path) | _written(other, path) & _valid(one, path)
        if not both_valid:
            return True
        if both_valid != {"object"}:
            return False
        here, there = properties_of(one, path), properties_of(other, path)
        shared = here.keys() & there.keys() & required_by(one, path) & required_by(other, path)
        return any(
            self._deeper(self._disjoint, constraints(here[name], path), constraints(there[name], path), path)
            for name in shared
        )

    def _of_types(self, schema: Schema, path: str) -> list[str]:
        """Expressions for the values of each type."""
        values = listed_values(schema, path)
        try:
            if values is not None:
                return self._listed(values, schema, path)
            return [self._of_type(kind, schema, path) for kind in sorted(kinds(schema, path))]
        except Unsupported as error:
            raise error if " (at $" in str(error) else Unsupported(f"{error} (at {path[:200]})") from None

    def _listed(self, values: list[Json], schema: Schema, path: str) -> list[str]:
        beside = schema.keys() - {"enum", "const", "type"}
        if beside:
            raise Unsupported(f"enum and const without {min(beside)!r} beside them")
        allowed = kinds(schema, path) if "type" in schema else None
        return [literal(dumps(value)) for value in values if allowed is None or _is_of(value, allowed)]

    def _of_type(self, kind: str, schema: Schema, path: str) -> str:
        if kind == "object":
            return object_of(schema, path, self._value, self._rules)
        if kind == "array":
            return array_of(schema, path, self._value, self._rules)
        return scalar(kind, schema, self._rules)

    def _deeper(self, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The step, one level deeper."""
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise Unsupported(f"schemas nested at most {MOST_DEPTH} times, and not consisting of themselves")
        try:
            return step(*args, **kwargs)
        finally:
            self._depth -= 1


def _comparing(one: Schema, other: Schema) -> int:
    """About how many steps it takes to compare two schemas: each value of a list of one with each of the other's."""
    each = sum(len(value) for value in (*one.values(), *other.values()) if isinstance(value, list | dict))
    lists = [(one[name], other[name]) for name in one.keys() & other.keys()]
    pairs = sum(_size(mine) * len(theirs) for mine, theirs in lists if isinstance(theirs, list))
    return OF_A_PAIR + each + pairs


def _size(value: Json) -> int:
    """How many values there are in it, with itself."""
    if isinstance(value, list):
        return 1 + sum(map(_size, value))
    return 1 + sum(map(_size, value.values())) if isinstance(value, dict) else 1


def _too_many(path: str) -> Unsupported:
    return Unsupported(f"schemas of at most {MOST_OPTIONS} alternatives (at {path})")


def _written(schema: Schema, path: str) -> set[str]:
    """The types of what is written under the schema, integers being numbers."""
    values = listed_values(schema, path)
    found = kinds(schema, path) if values is None else {kind_of(value) for value in values}
    return {"number" if kind == "integer" else kind for kind in found}


def _valid(schema: Schema, path: str) -> set[str]:
    """The types of what is valid under the schema, integers being numbers."""
    if "type" in schema or listed_values(schema, path) is not None:
        return _written(schema, path)
    return set(TYPES) - {"integer"}


def _is_of(value: Json, allowed: frozenset[str]) -> bool:
    kind = kind_of(value)
    return kind in allowed or (kind == "integer" and "number" in allowed)
