"""JSON Schema as rules of a grammar: every text of the grammar is valid, and no keyword is passed over.

The grammar leaves out, of what would be valid: spaces other than one after each comma and colon; properties in another
order than they are named in; further properties, where `properties` or `patternProperties` are named and
`additionalProperties` is not a schema; types that the keywords are not about, where `type` is missing; long numbers
(`numbers`), rare formats of strings (`strings`), strings and names of which only a part matches a pattern; numbers with
a fraction, where `not` is about integers; strings with escapes, where `not` lists strings.

Keywords are said within bounds and refused beyond them, by name:

- `not`, and `if` where it fails: the opposite is built by De Morgan's laws (`negation`) of `type`, `enum`, `const`,
  `properties`, `required`, `allOf`, `anyOf`, `not`, and limits of numbers, lengths and items. Excluded values filter
  listed ones and plain strings.
- `contains`, `minContains`: without `prefixItems` and `uniqueItems`; `maxContains` where it is at least `maxItems`.
- `uniqueItems`: of at most 8 listed values, or of at most one item.
- `patternProperties`: where no name made from a pattern is named or matches another pattern (`patterns`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain, combinations, product
from typing import ParamSpec, TypeVar

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
OF_A_PAIR = 20  # steps at least
COMBINED = ("$ref", "allOf", "not", "anyOf", "oneOf")

P = ParamSpec("P")
T = TypeVar("T")


class SchemaRules:
    """Makes the expressions for the values of `schema` and of what it refers to; equal schemas are made once."""

    def __init__(self, schema: Json, rules: Rules) -> None:
        self._whole = schema
        self._rules = rules
        self._made: dict[str, str] = {}
        self._impossible: set[str] = set()
        self._depth = 0
        self._left_out = 0  # times that an option may be narrower than the schema

    def root(self) -> str:
        """The expression for the whole. Errors: Unsupported, saying what and where."""
        return self._value(self._whole, "$")

    def _value(self, schema: Json, path: str) -> str:
        """Any value that is valid under the schema. Errors: Unsupported, and Unsatisfiable where there is none."""
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
                self._rules.define(name, NOTHING)  # referred to by nothing that is kept
                self._impossible.add(key)
                while len(self._made) > before:  # what was made since may refer to it
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
        """The schema as schemas without references and combinations, one of which has to be valid."""
        self._rules.work(OF_A_PAIR)
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
            self._left_out += not schema.keys().isdisjoint((*COMBINED, "if"))  # what these evaluate
        return constraints(schema, path)

    def _negated(self, schema: Json, path: str) -> list[Json]:
        """Schemas of which one is valid where `schema` is not."""
        found = constraints(schema, path)
        if "type" in found and "integer" in kinds(found, path):
            self._left_out += 1  # numbers with a fraction
        if "$ref" not in found:
            return negated(found, path)
        reference = self._target(found.pop("$ref"), path)
        return [{"not": reference}, *negated(found, path)]

    def _joined(self, schema: dict[str, Json], others: list[Json], path: str) -> list[dict[str, Json]]:
        """The options of a schema that has to be valid together with the others."""
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
        """Schemas of which one is valid where both are; without those that plainly never are."""
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
                self._left_out += 1  # a name that two patterns match
            if not _never(joined, path):
                found.append(joined)
            if len(found) > MAX_SCHEMA_OPTIONS:
                raise _too_many(path)
        return found

    def _resolved(self, schema: dict[str, Json], path: str) -> dict[str, Json]:
        """The schema without its reference, unless something else stands beside that."""
        for _ in range(MAX_SCHEMA_DEPTH):
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
            if not all(self._apart(one, other, path) for one in mine for other in theirs):
                raise _not_disjoint(path)

    def _apart(self, one: Schema, other: Schema, path: str) -> bool:
        """Whether plainly no value that is written under one option is valid under the other: a schema without `type`
        holds for types, too, that its keywords are not about, but nothing of these is written."""
        here, there = _narrowed(one, path), _narrowed(other, path)
        if not self._disjoint(here, other, path):
            return False
        return (here is one and there is other) or self._disjoint(one, there, path)

    def _disjoint(self, one: Schema, other: Schema, path: str) -> bool:
        """Whether plainly no value is valid under both: by type, by value, or by a property that both require."""
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
        """Expressions for the values of each type."""
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
        """The values under a schema, where all are listed."""
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
            self._rules.work(20 * sum(len(str(one)) for one in without))
            return [self._rules.regular(other_than([str(one) for one in without]))]
        if without:
            raise Unsupported(f"'not' about values of type {kind} that are not listed (at {path})")
        if kind == "object":
            return [object_of(schema, path, self._value, self._rules)]
        if kind == "array":
            return [array_of(schema, path, self._value, self._values, self._rules)]
        return [scalar(kind, schema, self._rules)]

    def _deeper(self, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The step, one level deeper."""
        self._depth += 1
        if self._depth > MAX_SCHEMA_DEPTH:
            raise Unsupported(f"schemas nested at most {MAX_SCHEMA_DEPTH} times, and not consisting of themselves")
        try:
            return step(*args, **kwargs)
        finally:
            self._depth -= 1


def _comparing(one: Schema, other: Schema) -> int:
    """About how many steps it takes to compare two schemas: each value of a list of one with each of the other's."""
    each = sum(len(value) for value in (*one.values(), *other.values()) if isinstance(value, list | dict))
    lists = [(one[name], other[name]) for name in one.keys() & other.keys()]
    pairs = sum(_size(mine) * len(theirs) for mine, theirs in lists if isinstance(theirs, list))
    mine, theirs = one.get("properties"), other.get("properties")
    if isinstance(mine, dict) and isinstance(theirs, dict):
        pairs += sum(_breadth(mine[name]) * _size(theirs[name]) for name in mine.keys() & theirs.keys())
    return OF_A_PAIR + each + pairs


def _breadth(schema: Json) -> int:
    """How many values and schemas are listed in it."""
    lists = (schema.get("enum"), schema.get("allOf")) if isinstance(schema, dict) else ()
    return 1 + sum(len(one) for one in lists if isinstance(one, list))


def _size(value: Json) -> int:
    """How many values there are in it, with itself."""
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
    """Whether its `not` lists values, and values only."""
    return lists_only(schema["not"])


def _narrowed(schema: Schema, path: str) -> dict[str, Json]:
    """The option with the types of what is written under it."""
    if "type" in schema or listed_values(schema, path) is not None:
        return dict(schema)
    return {**schema, "type": list[Json](sorted(kinds(schema, path)))}


def _never(schema: Schema, path: str) -> bool:
    """Whether plainly nothing is valid: by type, by value, or by a property that is required and not allowed."""
    types = kinds(schema, path) if "type" in schema else frozenset(TYPES)
    if types != {"object"}:
        return not types
    properties = properties_of(schema, path)
    return any(properties.get(name) is False for name in required_by(schema, path))


def _valid(schema: Schema, path: str) -> set[str]:
    """The types of what is valid under the schema, integers being numbers."""
    values = listed_values(schema, path)
    found = set(TYPES) if values is None else {kind_of(value) for value in values}
    if values is None and "type" in schema:
        found = set(kinds(schema, path))
    return {"number" if kind == "integer" else kind for kind in found}
