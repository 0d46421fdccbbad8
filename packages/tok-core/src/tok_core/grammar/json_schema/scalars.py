"""Build the expressions for numbers and strings from the keywords of a JSON Schema."""

from __future__ import annotations

from decimal import Decimal

from tok_core.grammar.json_schema.keywords import Json, Schema
from tok_core.grammar.json_schema.numbers import Bounds, decimal, integer, number
from tok_core.grammar.json_schema.strings import FORMATS, matching, string
from tok_core.grammar.regex import Unsupported
from tok_core.grammar.rules import Rules


def scalar(kind: str, schema: Schema, rules: Rules) -> str:
    """Return the expression for a value of type `kind`, neither object nor array. Raise Unsupported."""
    match kind:
        case "null":
            return '"null"'
        case "boolean":
            return rules.either(['"true"', '"false"'])
        case "string":
            return _string(schema, rules)
        case _:
            return _number(kind, schema, rules)


def size(schema: Schema, name: str) -> int | None:
    """Return a keyword's number of items, properties or characters; None if the keyword is missing."""
    value = schema.get(name)
    if value is None and name not in schema:
        return None
    found = decimal(value)
    if found is None or found != int(found) or not 0 <= found < 2**31:
        raise Unsupported(f"{name} as a natural number")
    return int(found)


def _number(kind: str, schema: Schema, rules: Rules) -> str:
    multiple = decimal(schema.get("multipleOf", 1))
    if multiple is None or multiple <= 0 or multiple != int(multiple):
        raise Unsupported("multipleOf a whole number")
    low, above = _nearest(limit(schema, "minimum"), limit(schema, "exclusiveMinimum"), 1)
    high, below = _nearest(limit(schema, "maximum"), limit(schema, "exclusiveMaximum"), -1)
    bounds = Bounds(low, high, above, below)
    if kind == "integer" or "multipleOf" in schema:
        return rules.regular(integer(bounds, int(multiple)))
    return rules.regular(number(bounds))


def limit(schema: Schema, name: str) -> Decimal | None:
    value: Json = schema.get(name)
    found = decimal(value)
    if found is None and name in schema:
        raise Unsupported(f"{name} as a number")
    return found


def _nearest(inclusive: Decimal | None, exclusive: Decimal | None, sign: int) -> tuple[Decimal | None, bool]:
    """Return the narrower of two limits, and whether it is exclusive; `sign`: 1 for lower limits, −1 for upper ones."""
    if exclusive is None or (inclusive is not None and inclusive * sign > exclusive * sign):
        return inclusive, False
    return exclusive, True


def _string(schema: Schema, rules: Rules) -> str:
    asked = [name for name in ("pattern", "format") if name in schema]
    least, most = size(schema, "minLength") or 0, size(schema, "maxLength")
    if not asked:
        return string(least, most, rules)
    if len(asked) > 1 or least or most is not None:
        raise Unsupported("strings with one of pattern, format, and minLength or maxLength")
    value = schema[asked[0]]
    if not isinstance(value, str) or (asked[0] == "format" and value not in FORMATS):
        allowed = "a regular expression" if asked[0] == "pattern" else f"one of {', '.join(FORMATS)}"
        raise Unsupported(f"{asked[0]} as {allowed}")
    return matching(value if asked[0] == "pattern" else FORMATS[value], rules)
