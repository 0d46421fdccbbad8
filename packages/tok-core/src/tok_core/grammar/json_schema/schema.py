"""Convert JSON Schema to rules of a grammar. Every text of the grammar is valid, and no keyword is ignored.

The grammar leaves out some valid texts:

- spaces other than one after each comma and colon
- properties in another order than the schema names them
- further properties, if `properties` or `patternProperties` are named and `additionalProperties` is not a schema
- types that the schema's keywords do not apply to, if `type` is missing
- long numbers (`numbers`) and rare formats of strings (`strings`)
- strings and names of which only a part matches a pattern
- numbers with a fraction, if `not` applies to integers
- strings with escapes, if `not` lists strings

Some keywords are supported within bounds; other uses are refused with an error that names the keyword:

- `not`, and a failing `if`: negated by De Morgan's laws (`negation`), for `type`, `enum`, `const`, `properties`,
  `required`, `allOf`, `anyOf`, `not`, and limits of numbers, lengths and items. Excluded values filter listed values
  and plain strings.
- `contains`, `minContains`: without `prefixItems` and `uniqueItems`. `maxContains`: if it is at least `maxItems`.
- `uniqueItems`: of at most 8 listed values, or of at most one item.
- `patternProperties`: if no name generated from a pattern is named or matches another pattern (`patterns`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain, combinations, product
from typing import ParamSpec, TypeVar
from urllib.parse import unquote

from tok_core.grammar.json_schema.arrays import array_of
from tok_core.grammar.json_schema.keywords import (
    OF_TYPE,
    TYPES,
    Json,
    Schema,
    both,
    constraints,
    excluded_values,
    is_of,
    kind_of,
    kinds,
    listed_values,
    lists_only,
    properties_of,
    required_by,
    same,
    schemas_of,
)
from tok_core.grammar.json_schema.negation import negated
from tok_core.grammar.json_schema.objects import object_of
from tok_core.grammar.json_schema.scalars import scalar, size
from tok_core.grammar.json_schema.strings import dumps, other_than
from tok_core.grammar.regex import Unsatisfiable, Unsupported
from tok_core.grammar.rules import NOTHING, Rules, literal

MAX_SCHEMA_DEPTH = 64
MAX_SCHEMA_OPTIONS = 1000
MIN_COMPARISON_STEPS = 20  # least number of steps to compare two schemas
COMBINED = ("$ref", "allOf", "not", "anyOf", "oneOf")  # resolved in this order

P = ParamSpec("P")
T = TypeVar("T")


class SchemaRules:
    """Builder of the expressions for `schema` and the schemas that it refers to; equal schemas are built once."""

    def __init__(self, schema: Json, rules: Rules) -> None:
        self._whole = schema
        self._rules = rules
        self._made: dict[str, str] = {}
        self._impossible: set[str] = set()
        self._depth = 0
        self._left_out = 0  # how often an option may have become narrower than the schema

    def root(self) -> str:
        """Return the expression for the whole schema. Raise Unsupported, saying what is unsupported and where."""
        return self._value(self._whole, "$")

    def _value(self, schema: Json, path: str) -> str:
        """Return the expression for any valid value. Raise Unsupported, or Unsatisfiable if there is none."""
        found = constraints(schema, path)
        if found.keys() == {"$ref"}:
            found = self._resolved(found, path)
        key = json.dumps(found, sort_keys=True)
        self._rules.work(len(key) // 4)
        if key in self._impossible:
            raise _nothing(path)
        if key not in self._made:
            before = len(self._made)
            self._made[key] = name = self._rules.reserve()
            try:
                self._rules.define(name, self._deeper(self._expression, found, path))
            except Unsatisfiable:
                self._rules.define(name, NOTHING)  # no kept expression refers to it
                self._impossible.add(key)
                while len(self._made) > before:  # expressions built since may refer to it
                    self._made.popitem()
                raise
        return self._made[key]

    def _expression(self, schema: dict[str, Json], path: str) -> str:
        parts: list[str] = []
        reason = _nothing(path)
        for option in self._options(schema, path):
            try:
                parts += self._of_types(option, path)
            except Unsatisfiable as error:
                reason = error
        if not parts:
            raise reason
        return self._rules.either(parts)

    def _options(self, schema: dict[str, Json], path: str) -> list[dict[str, Json]]:
        """Return alternatives to the schema without references and combinations; at least one of them must be valid."""
        self._rules.work(MIN_COMPARISON_STEPS)
        name = next((name for name in COMBINED if name in schema and not (name == "not" and _settled(schema))), None)
        if name is None:
            return [schema]
        rest = {key: value for key, value in schema.items() if key != name}
        if name == "$ref":
            return self._deeper(self._joined, rest, [self._target(schema["$ref"], path)], path)
        listed = self._negated(schema["not"], path) if name == "not" else schemas_of(schema, name, path)
        if len(listed) > MAX_SCHEMA_OPTIONS:
            raise _too_many(path)
        if name == "allOf":
            return self._deeper(self._joined, rest, listed, path)
        left_out = self._left_out
        branches = [self._deeper(self._options, self._constraints(one, path), path) for one in listed]
        if name == "oneOf":
            if left_out != self._left_out:
                raise _not_disjoint(path)
            self._check_disjoint(branches, path)
            narrowed = [[_narrowed(option, path) for option in branch] for branch in branches]
            self._left_out += narrowed != branches
            branches = narrowed
        found: list[dict[str, Json]] = []
        for option in chain.from_iterable(branches):
            found += self._joined(rest, [option], path)
            if len(found) > MAX_SCHEMA_OPTIONS:
                raise _too_many(path)
        return found

    def _constraints(self, schema: Json, path: str) -> dict[str, Json]:
        if isinstance(schema, dict) and not schema.keys().isdisjoint(("unevaluatedProperties", "unevaluatedItems")):
            self._left_out += not schema.keys().isdisjoint((*COMBINED, "if"))  # unevaluated* would depend on these
        return constraints(schema, path)

    def _negated(self, schema: Json, path: str) -> list[Json]:
        """Return alternatives that together negate `schema`."""
        found = constraints(schema, path)
        if "type" in found and "integer" in kinds(found, path):
            self._left_out += 1  # leaves out numbers with a fraction
        if "$ref" not in found:
            return negated(found, path)
        reference = self._target(found.pop("$ref"), path)
        return [{"not": reference}, *negated(found, path)]

    def _joined(self, schema: dict[str, Json], others: list[Json], path: str) -> list[dict[str, Json]]:
        """Return the options of the conjunction of `schema` and all `others`."""
        found = [schema]
        for other in others:
            demanded = self._constraints(other, path)
            found = [more for one in found for more in self._both(one, demanded, path)]
            if len(found) > MAX_SCHEMA_OPTIONS:
                raise _too_many(path)
        options = [option for one in found for option in self._options(one, path)]
        if len(options) > MAX_SCHEMA_OPTIONS:
            raise _too_many(path)
        return options

    def _both(self, schema: dict[str, Json], other: dict[str, Json], path: str) -> list[dict[str, Json]]:
        """Return alternatives for the conjunction of two schemas, without those that are evidently never valid."""
        if "$ref" in schema and "$ref" in other:
            other = self._resolved(other, path)
        mine, theirs = [schema], [other]
        shared = schema.keys() & other.keys()
        if shared & {"anyOf", "oneOf"} or ("not" in shared and not _settled(schema)):
            mine = self._deeper(self._options, schema, path)
        if "not" in shared and not _settled(other):
            theirs = self._deeper(self._options, other, path)
        found = []
        for one, more in product(mine, theirs):
            self._rules.work(_comparing(one, more))
            joined = both(one, more, path)
            if "patternProperties" in joined and not any(OF_TYPE["object"].isdisjoint(part) for part in (one, more)):
                self._left_out += 1  # leaves out names that two patterns match
            if not _never(joined, path):
                found.append(joined)
            if len(found) > MAX_SCHEMA_OPTIONS:
                raise _too_many(path)
        return found

    def _resolved(self, schema: dict[str, Json], path: str) -> dict[str, Json]:
        """Return the target of a schema that is only a `$ref`; return a schema with other keywords unchanged."""
        for _ in range(MAX_SCHEMA_DEPTH):
            if schema.keys() != {"$ref"}:
                return schema
            schema = constraints(self._target(schema["$ref"], path), path)
        raise Unsupported(f"schemas that do not consist of themselves (at {path})")

    def _target(self, reference: Json, path: str) -> Json:
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise Unsupported(f"$ref within the schema, as #/… (at {path})")
        found = self._whole
        for part in unquote(reference).split("/")[1:]:
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
            if not all(self._apart(one, other, path) for one in mine for other in theirs):
                raise _not_disjoint(path)

    def _apart(self, one: Schema, other: Schema, path: str) -> bool:
        """Return whether evidently no value written under one option is valid under the other.

        A schema without `type` is also valid for types that its keywords do not apply to, but the grammar writes no
        values of those types.
        """
        here, there = _narrowed(one, path), _narrowed(other, path)
        if not self._disjoint(here, other, path):
            return False
        return (here is one and there is other) or self._disjoint(one, there, path)

    def _disjoint(self, one: Schema, other: Schema, path: str) -> bool:
        """Return whether evidently no value is valid under both: by type, value, or a property that both require."""
        self._rules.work(_comparing(one, other))
        mine, theirs = listed_values(one, path), listed_values(other, path)
        if mine is not None and theirs is not None:
            return not any(same(x, y) for x in mine for y in theirs)
        both_valid = _valid(one, path) & _valid(other, path)
        if both_valid != {"object"}:
            return not both_valid
        here, there = properties_of(one, path), properties_of(other, path)
        shared = here.keys() & there.keys() & required_by(one, path) & required_by(other, path)
        return any(
            self._deeper(self._disjoint, constraints(here[name], path), constraints(there[name], path), path)
            for name in shared
        )

    def _of_types(self, schema: Schema, path: str) -> list[str]:
        """Return expressions for the values of each type."""
        values = listed_values(schema, path)
        try:
            if values is not None:
                return self._listed(values, schema, path)
            excluded = excluded_values(schema, path)
            found: list[str] = []
            reason = None
            for kind in sorted(kinds(schema, path)):
                try:
                    found += self._of_type(kind, schema, excluded, path)
                except Unsatisfiable as error:
                    reason = error
            if reason is not None and not found:
                raise reason
            return found
        except Unsupported as error:
            if " (at $" in str(error):
                raise
            raise type(error)(f"{error} (at {path[:200]})") from None

    def _listed(self, values: list[Json], schema: Schema, path: str) -> list[str]:
        return [literal(dumps(value)) for value in self._left(values, schema, path)]

    def _left(self, values: list[Json], schema: Schema, path: str) -> list[Json]:
        """Return the listed values that the other keywords allow."""
        allowed = kinds(schema, path) if "type" in schema else None
        excluded = excluded_values(schema, path)
        self._rules.work(len(values) * _size(excluded))
        found = [
            value
            for value in values
            if (allowed is None or is_of(value, allowed)) and not any(same(value, one) for one in excluded)
        ]
        for kind, keywords in OF_TYPE.items():
            beside = keywords & schema.keys()
            if beside and any(is_of(value, frozenset({kind})) for value in found):
                raise Unsupported(f"enum and const without {min(beside)!r} beside them")
        return found

    def _values(self, schema: Json, path: str) -> list[Json] | None:
        """Return all values that the grammar writes under a schema; None if they are not listed."""
        found: list[Json] = []
        for option in self._deeper(self._options, constraints(schema, path), path):
            values = listed_values(option, path)
            if values is None:
                if not kinds(option, path) <= {"boolean", "null"}:
                    return None
                values = [True, False, None]
                option = {name: option[name] for name in ("type", "not") if name in option}
            found += self._left(values, option, path)
        return found

    def _of_type(self, kind: str, schema: Schema, excluded: list[Json], path: str) -> list[str]:
        without = [value for value in excluded if is_of(value, frozenset({kind}))]
        if kind == "string":
            least, most = size(schema, "minLength") or 0, size(schema, "maxLength")
            without = [one for one in without if least <= len(str(one)) and (most is None or len(str(one)) <= most)]
        if without and kind in ("null", "boolean"):
            return self._listed([None] if kind == "null" else [True, False], {"not": {"enum": without}}, path)
        if without and kind == "string" and schema.keys().isdisjoint(OF_TYPE["string"]):
            return [other_than([str(one) for one in without], self._rules)]
        if without:
            raise Unsupported(f"'not' about values of type {kind} that are not listed (at {path})")
        if kind == "object":
            return [object_of(schema, path, self._value, self._rules)]
        if kind == "array":
            return [array_of(schema, path, self._value, self._values, self._rules)]
        return [scalar(kind, schema, self._rules)]

    def _deeper(self, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `step` one nesting level deeper. Raise Unsupported beyond MAX_SCHEMA_DEPTH."""
        self._depth += 1
        if self._depth > MAX_SCHEMA_DEPTH:
            raise Unsupported(f"schemas nested at most {MAX_SCHEMA_DEPTH} times, and not consisting of themselves")
        try:
            return step(*args, **kwargs)
        finally:
            self._depth -= 1


def _comparing(one: Schema, other: Schema) -> int:
    """Estimate the steps of comparing two schemas: each value of a list of one with each value of the other's list."""
    each = sum(len(value) for value in (*one.values(), *other.values()) if isinstance(value, list | dict))
    lists = [(one[name], other[name]) for name in one.keys() & other.keys()]
    pairs = sum(_size(mine) * len(theirs) for mine, theirs in lists if isinstance(theirs, list))
    mine, theirs = one.get("properties"), other.get("properties")
    if isinstance(mine, dict) and isinstance(theirs, dict):
        pairs += sum(_breadth(mine[name]) * _size(theirs[name]) for name in mine.keys() & theirs.keys())
    return MIN_COMPARISON_STEPS + each + pairs


def _breadth(schema: Json) -> int:
    """Return how many values and schemas `enum` and `allOf` list, plus one."""
    lists = (schema.get("enum"), schema.get("allOf")) if isinstance(schema, dict) else ()
    return 1 + sum(len(one) for one in lists if isinstance(one, list))


def _size(value: Json) -> int:
    """Return the number of values nested in a value, including itself."""
    if isinstance(value, list):
        return 1 + sum(map(_size, value))
    return 1 + sum(map(_size, value.values())) if isinstance(value, dict) else 1


def _not_disjoint(path: str) -> Unsupported:
    return Unsupported(f"oneOf of which plainly no two are valid at once (at {path}), or anyOf")


def _too_many(path: str) -> Unsupported:
    return Unsupported(f"schemas of at most {MAX_SCHEMA_OPTIONS} alternatives (at {path})")


def _nothing(path: str) -> Unsatisfiable:
    return Unsatisfiable(f"schemas under which something is valid (nothing is at {path})")


def _settled(schema: Schema) -> bool:
    """Return whether the schema's `not` only lists values."""
    return lists_only(schema["not"])


def _narrowed(schema: Schema, path: str) -> dict[str, Json]:
    """Return the option restricted to the types of the values that the grammar writes under it."""
    if "type" in schema or listed_values(schema, path) is not None:
        return dict(schema)
    return {**schema, "type": list[Json](sorted(kinds(schema, path)))}


def _never(schema: Schema, path: str) -> bool:
    """Return whether evidently no value is valid: by type, or by a property that is required and not allowed."""
    types = kinds(schema, path) if "type" in schema else frozenset(TYPES)
    if types != {"object"}:
        return not types
    properties = properties_of(schema, path)
    return any(properties.get(name) is False for name in required_by(schema, path))


def _valid(schema: Schema, path: str) -> set[str]:
    """Return the types of the values valid under the schema; integers count as numbers."""
    values = listed_values(schema, path)
    found = set(TYPES) if values is None else {kind_of(value) for value in values}
    if values is None and "type" in schema:
        found = set(kinds(schema, path))
    return {"number" if kind == "integer" else kind for kind in found}
