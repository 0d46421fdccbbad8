"""Build the expressions for arrays from the keywords of a JSON Schema.

With `contains`, items that are valid under it may come anywhere, with others between them. With `uniqueItems`, the
items are listed values, and each rule stands for one set of values already used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from tok_core.grammar.json_schema.keywords import Json, Schema, all_of, same
from tok_core.grammar.json_schema.scalars import size
from tok_core.grammar.json_schema.strings import dumps
from tok_core.grammar.regex import Unsatisfiable, Unsupported
from tok_core.grammar.rules import NOTHING, Rules, literal, sequence

MAX_UNIQUE_VALUES = 8  # values, each subset of which gets a rule
MAX_COUNTED_ITEMS = 500  # largest of minItems, maxItems and minContains, times minContains
COMMA: Final = literal(", ")

Value = Callable[[Json, str], str]
"""Returns the expression for the values that are valid under the schema at a path."""
Listing = Callable[[Json, str], list[Json] | None]
"""Returns all values that the grammar writes for the schema at a path; None if they are not listed."""


class _Counts(NamedTuple):
    least: int
    most: int | None


def array_of(schema: Schema, path: str, value: Value, listing: Listing, rules: Rules) -> str:
    """Return the expression for an array. Raise Unsupported if a keyword cannot be expressed."""
    firsts, rest = schema.get("prefixItems", []), schema.get("items", "prefixItems" not in schema)
    if not isinstance(firsts, list):
        raise Unsupported("prefixItems as a list of schemas")
    items: list[str] = []
    for index, one in enumerate(firsts[: size(schema, "maxItems")]):
        made = _item(one, f"{path}[{index}]", value)
        if made is None:
            rest = False
            break
        items.append(made)
    counts = _counts(schema, len(items), rest)
    if counts.most != 0 and ("contains" in schema or (schema.get("uniqueItems") and counts.most != 1)):
        if firsts or ("contains" in schema and "uniqueItems" in schema):
            raise Unsupported("contains and uniqueItems without each other and without prefixItems")
        inside = _containing if "contains" in schema else _unique
        return sequence([literal("["), inside(schema, rest, counts, path, value, listing, rules), literal("]")])
    if "contains" in schema:
        raise Unsatisfiable("schemas under which something is valid: contains needs an item")
    items = items[: counts.most]
    left = None if counts.most is None else counts.most - len(items)
    tail = NOTHING
    if left != 0:
        made = _item(rest, f"{path}[]", value)
        if made is None:
            return array_of({**schema, "items": False}, path, value, listing, rules)
        if not items:
            return sequence([literal("["), between(made, *counts, rules), literal("]")])
        tail = rules.repeat(sequence([COMMA, made]), max(0, counts.least - len(items)), left)
    for index in reversed(range(len(items))):
        found = sequence([COMMA if index else NOTHING, items[index], tail])
        tail = found if index < counts.least else rules.maybe(found)
    return sequence([literal("["), tail, literal("]")])


def _counts(schema: Schema, firsts: int, rest: Json) -> _Counts:
    """Return the bounds on the number of items."""
    least, most = size(schema, "minItems") or 0, size(schema, "maxItems")
    if rest is False:
        most = firsts if most is None else min(most, firsts)
    if most is not None and most < least:
        raise Unsatisfiable("schemas under which something is valid: minItems is above maxItems")
    return _Counts(least, most)


def _item(schema: Json, path: str, value: Value) -> str | None:
    """Return the expression for an item; None if no value is valid."""
    try:
        return None if schema is False else value(schema, path)
    except Unsatisfiable:
        return None


def _containing(
    schema: Schema, rest: Json, counts: _Counts, path: str, value: Value, listing: Listing, rules: Rules
) -> str:
    """Return the expression for the items of an array of which at least `minContains` are valid under `contains`."""
    least, most = counts
    needed, limit = size(schema, "minContains") or 0, size(schema, "maxContains")
    if limit is not None and (most is None or most > limit):
        raise Unsupported("maxContains of at least maxItems")
    if max(least, most or 0, needed) * needed > MAX_COUNTED_ITEMS:
        raise Unsupported(f"contains where the items counted, times minContains, come to at most {MAX_COUNTED_ITEMS}")
    if most is not None and needed > most:
        raise Unsatisfiable("schemas under which something is valid: minContains is above maxItems")
    if not needed:
        return between(value(rest, f"{path}[]"), least, most, rules)
    wanted, other = value(all_of(path, rest, schema["contains"]), f"{path}[]"), value(rest, f"{path}[]")
    end = max(1, least) if most is None else most  # largest number of items that the rules distinguish
    after = [
        rules.repeat(sequence([COMMA, other]), max(0, least - at), None if most is None else most - at)
        for at in range(end + 1)
    ]
    for left in range(1, needed + 1):  # items still needed that are valid under `contains`
        found = [NOTHING] * (end + 1)
        for at in reversed(range(end + 1)):
            if most is not None and at + left > most:
                continue
            comma, following = COMMA if at else NOTHING, min(at + 1, end)
            name = rules.reserve()
            options = [sequence([comma, wanted, after[following]])]
            if most is None or at + 1 + left <= most:
                options.append(sequence([comma, other, name if following == at else found[following]]))
            rules.define(name, rules.either(options))
            found[at] = name
        after = found
    return after[0]


def _unique(
    schema: Schema, rest: Json, counts: _Counts, path: str, value: Value, listing: Listing, rules: Rules
) -> str:
    """Return the expression for the items of an array of listed values, each used at most once."""
    listed = listing(rest, f"{path}[]")
    values: list[Json] = []
    for one in listed or []:
        rules.work(len(values))
        if not any(same(one, other) for other in values):
            values.append(one)
        if len(values) > MAX_UNIQUE_VALUES:
            break
    if listed is None or len(values) > MAX_UNIQUE_VALUES:
        raise Unsupported(f"{'uniqueItems'!r} where items are at most {MAX_UNIQUE_VALUES} listed values (at {path})")
    least, most = counts
    if least > len(values):
        raise Unsatisfiable("schemas under which something is valid: minItems is above the number of unique items")
    rules.work(len(values) << len(values))
    items = [rules.rule(literal(dumps(one))) for one in values]
    following: dict[int, str] = {}  # expressions for the further items, by the bit set of used values
    for taken in reversed(range(1 << len(values))):
        count = taken.bit_count()
        options = [NOTHING] if count >= least else []
        if most is None or count < most:
            comma = COMMA if taken else NOTHING
            left = [index for index in range(len(values)) if not taken >> index & 1]
            options += [sequence([comma, items[index], following[taken | 1 << index]]) for index in left]
        if options and (most is None or count <= most):
            following[taken] = rules.rule(rules.either(options))
    return following[0]


def between(one: str, least: int, most: int | None, rules: Rules) -> str:
    """Return the expression for `least` to `most` of `one`, separated by commas; `most` None: unbounded."""
    if most == 0:
        return NOTHING
    more = rules.repeat(sequence([COMMA, one]), max(0, least - 1), None if most is None else most - 1)
    found = sequence([one, more])
    return found if least else rules.maybe(found)
