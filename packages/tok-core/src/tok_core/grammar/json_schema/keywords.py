"""Sort JSON Schema keywords into supported ones and those without effect, and merge two schemas into one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Final

from tok_core.grammar.regex import Unsupported

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
Schema = Mapping[str, Json]

MAX_INTERSECTED_VALUES = 64  # values of a list that `all_of` intersects with others
TYPES: Final = ("object", "array", "string", "number", "integer", "boolean", "null")
OF_TYPE: Final[dict[str, frozenset[str]]] = {
    "object": frozenset(
        {
            *("properties", "required", "additionalProperties", "patternProperties", "minProperties"),
            "maxProperties",
        }
    ),
    "array": frozenset(
        {
            *("items", "prefixItems", "minItems", "maxItems", "contains", "minContains", "maxContains"),
            "uniqueItems",
        }
    ),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
}
ANY_TYPE: Final = frozenset({"type", "enum", "const", "anyOf", "oneOf", "allOf", "not", "$ref"})
NOTES: Final = frozenset(
    {
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$schema"),
        *("$comment", "$defs", "definitions", "contentEncoding", "contentMediaType", "discriminator"),
    }
)
"""Keywords without an effect on validity; names that begin with "x-" have none, either."""
SUPPORTED: Final = ANY_TYPE.union(*OF_TYPE.values())


def constraints(schema: Json, path: str) -> dict[str, Json]:
    """Return the keywords that affect validity. Raise Unsupported, naming a keyword that no grammar can express."""
    if schema is True:
        return {}
    if schema is False:
        return {"enum": []}
    if not isinstance(schema, dict):
        raise Unsupported(f"a schema, an object or true or false, at {path}")
    found: dict[str, Json] = {}
    for name, value in schema.items():
        if name in _NEUTRAL and value is False:
            if name == "unevaluatedProperties" and "additionalProperties" not in schema:
                found["additionalProperties"] = False
            if name == "unevaluatedItems" and "items" not in schema:
                found["items"] = False
        elif name in SUPPORTED and (name != "uniqueItems" or value is True):
            found[name] = value
        elif name not in NOTES | _CONDITION and not name.startswith("x-") and (name, path) != ("$id", "$"):
            raise Unsupported(f"schemas without {name[:80]!r} (at {path}), which a grammar cannot say")
    _condition(schema, found)
    _counted(found)
    return found


_CONDITION: Final = frozenset({"if", "then", "else"})
_NEUTRAL: Final = frozenset({"uniqueItems", "unevaluatedProperties", "unevaluatedItems", "nullable"})
"""Keywords that are accepted if they are false."""


def _condition(schema: Mapping[str, Json], found: dict[str, Json]) -> None:
    """Add `if`, `then` and `else` to `allOf` as alternatives."""
    if "if" not in schema or ("then" not in schema and "else" not in schema):
        return  # without effect
    met: Json = {"allOf": [schema["if"], schema.get("then", True)]}
    missed: Json = {"allOf": [{"not": schema["if"]}, schema.get("else", True)]}
    others = found.get("allOf", [])
    if isinstance(others, list):  # else refused later
        found["allOf"] = [*others, {"anyOf": [met, missed]}]


def _counted(found: dict[str, Json]) -> None:
    """Give `contains` its default `minContains`, or remove the keywords if they have no effect."""
    least = found.get("minContains", 1)
    none = least == 0 and not isinstance(least, bool) and "maxContains" not in found
    if "contains" not in found or none:
        for name in ("contains", "minContains", "maxContains"):
            found.pop(name, None)
    else:
        found["minContains"] = least


def kinds(schema: Schema, path: str) -> frozenset[str]:
    """Return the types that the schema allows: those in `type`, else those that its keywords apply to, else all."""
    if "type" not in schema:
        about = frozenset(kind for kind, names in OF_TYPE.items() if not names.isdisjoint(schema))
        return about or frozenset(TYPES) - {"integer"}
    named = schema["type"]
    listed = named if isinstance(named, list) else [named]
    for one in listed:
        if not isinstance(one, str) or one not in TYPES:
            raise Unsupported(f"type among {', '.join(TYPES)} (at {path})")
    found = frozenset(map(str, listed))
    return found - {"integer"} if "number" in found else found


def both(one: Schema, other: Schema, path: str) -> dict[str, Json]:
    """Return a schema, without notes, that is valid where both are. Raise Unsupported if no grammar can express it."""
    found: dict[str, Json] = dict(one)
    for name, value in other.items():
        if name not in found or same(found[name], value):
            found[name] = value
        elif name in _COMBINED:
            found[name] = _COMBINED[name](found[name], value)
        elif name not in _MERGED:
            raise Unsupported(f"schemas that do not demand two of {name!r} at once (at {path})")
    if "type" in one and "type" in other:
        found["type"] = list[Json](sorted(_common_types(kinds(one, path), kinds(other, path))))
    if "items" in one and "items" in other:
        found["items"] = all_of(path, one["items"], other["items"])
    if "prefixItems" in one or "prefixItems" in other:
        found["prefixItems"] = _prefix_items(one, other, path)
    if "properties" in one or "properties" in other:
        found["properties"] = _properties(one, other, path)
    if "patternProperties" in one or "patternProperties" in other:
        found["patternProperties"] = _patterns(one, other, path)
    if "additionalProperties" in one and "additionalProperties" in other:
        found["additionalProperties"] = all_of(path, one["additionalProperties"], other["additionalProperties"])
    lists = [values for schema in (one, other) if (values := listed_values(schema, path)) is not None]
    if lists:
        found.pop("const", None)
        found["enum"] = [value for value in lists[0] if all(any(same(value, x) for x in more) for more in lists[1:])]
    return found


def listed_values(schema: Schema, path: str) -> list[Json] | None:
    """Return the values of `enum` or `const`; None if the schema has neither."""
    values = schema.get("enum")
    if values is not None and not isinstance(values, list):
        raise Unsupported(f"enum with a list of values (at {path})")
    for name in ("enum", "const"):
        if not _finite(schema.get(name)):
            raise Unsupported(f"{name} with numbers of at most 1.7976931348623157e308 (at {path})")
    if "const" in schema:
        const = schema["const"]
        return [const] if values is None or any(same(const, value) for value in values) else []
    return values


def excluded_values(schema: Schema, path: str) -> list[Json]:
    """Return the values that `not` excludes, if it only lists values; else an empty list."""
    return listed_values(schema["not"], path) or [] if lists_only(schema.get("not")) else []  # type: ignore[arg-type]


def lists_only(schema: Json) -> bool:
    """Return whether a schema is an `enum` and nothing else."""
    return isinstance(schema, dict) and schema.keys() == {"enum"}


def _finite(value: Json) -> bool:
    """Return whether no number in a value is infinite, as JSON readers read numbers beyond the range of floats."""
    if isinstance(value, list):
        return all(map(_finite, value))
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    return not isinstance(value, float) or math.isfinite(value)


def properties_of(schema: Schema, path: str) -> dict[str, Json]:
    """Return the schemas of `properties`, by name."""
    return _by_name(schema, "properties", path)


def patterns_of(schema: Schema, path: str) -> dict[str, Json]:
    """Return the schemas of `patternProperties`, by regular expression."""
    return _by_name(schema, "patternProperties", path)


def schemas_of(schema: Schema, name: str, path: str) -> list[Json]:
    """Return the schemas of `allOf`, `anyOf` or `oneOf`."""
    listed = schema[name]
    if not isinstance(listed, list) or not listed:
        raise Unsupported(f"{name} as a list of schemas (at {path})")
    return listed


def _by_name(schema: Schema, keyword: str, path: str) -> dict[str, Json]:
    found = schema.get(keyword, {})
    if not isinstance(found, dict):
        raise Unsupported(f"{keyword} as an object (at {path})")
    return found


def required_by(schema: Schema, path: str) -> set[str]:
    """Return the names of `required`."""
    found = schema.get("required", [])
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise Unsupported(f"required as a list of names (at {path})")
    return set(map(str, found))


def same(one: Json, other: Json) -> bool:
    """Return whether two values are equal in JSON Schema: 1 and 1.0 are, 1 and true are not."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def kind_of(value: Json) -> str:
    """Return the type of a value: "integer" for numbers without a fraction."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "string"
        case list():
            return "array"
        case dict():
            return "object"
        case _:
            return "integer" if value == int(value) else "number"


def is_of(value: Json, allowed: frozenset[str]) -> bool:
    """Return whether a value has one of the types."""
    kind = kind_of(value)
    return kind in allowed or (kind == "integer" and "number" in allowed)


def _properties(one: Schema, other: Schema, path: str) -> dict[str, Json]:
    """Return the properties of both schemas.

    A property that only one schema names must satisfy `additionalProperties` of the other.
    """
    mine, theirs = properties_of(one, path), properties_of(other, path)
    found: dict[str, Json] = {}
    for name in [*mine, *(name for name in theirs if name not in mine)]:
        parts = []
        for schema, properties in ((one, mine), (other, theirs)):
            if name in properties:
                parts.append(properties[name])
            elif "additionalProperties" in schema:
                parts.append(schema["additionalProperties"])
        found[name] = parts[0] if len(parts) == 1 else all_of(path, *parts)
    return found


def _patterns(one: Schema, other: Schema, path: str) -> dict[str, Json]:
    """Return the patterns of both schemas.

    The schema of a pattern that only one of them has must satisfy `additionalProperties` of the other.
    """
    mine, theirs = patterns_of(one, path), patterns_of(other, path)
    found: dict[str, Json] = {}
    for pattern in {**mine, **theirs}:
        parts = [
            patterns.get(pattern, schema.get("additionalProperties", True))
            for schema, patterns in ((one, mine), (other, theirs))
        ]
        found[pattern] = all_of(path, *parts)
    return found


def _prefix_items(one: Schema, other: Schema, path: str) -> list[Json]:
    """Merge the prefix items of both by position.

    Where only one schema has a prefix item, the `items` of the other apply, too.
    """
    mine, theirs = one.get("prefixItems", []), other.get("prefixItems", [])
    if not isinstance(mine, list) or not isinstance(theirs, list):
        raise Unsupported("prefixItems as a list of schemas")
    count = max(len(mine), len(theirs))
    here = [*mine, *[one.get("items", True)] * (count - len(mine))]
    there = [*theirs, *[other.get("items", True)] * (count - len(theirs))]
    return [all_of(path, *pair) for pair in zip(here, there, strict=True)]


def all_of(path: str, *parts: Json) -> Json:
    """Return a schema that is valid where all parts are; intersect short lists of values at once."""
    distinct: list[Json] = []
    for part in chain.from_iterable(map(_parts, parts)):
        if part is not True and not any(same(part, one) for one in distinct):
            distinct.append(part)
    if False in [part for part in distinct if isinstance(part, bool)]:
        return False
    distinct = _folded(distinct, path)
    return True if not distinct else distinct[0] if len(distinct) == 1 else {"allOf": distinct}


def _parts(schema: Json) -> list[Json]:
    listed = schema.get("allOf") if isinstance(schema, dict) and len(schema) == 1 else None
    return listed if isinstance(listed, list) and listed else [schema]


def _folded(parts: list[Json], path: str) -> list[Json]:
    """Merge all parts that list or exclude values into one list of values."""
    listed = [(part, values) for part in parts if (values := _only_values(part, path)) is not None]
    if not listed:
        return parts
    left, rest = listed[0][1], []
    for _, values in listed[1:]:
        left = [value for value in left if any(same(value, one) for one in values)]
    for part in parts:
        if _only_values(part, path) is None:
            excluded = part.get("not") if isinstance(part, dict) and part.keys() == {"not"} else None
            values = _only_values(excluded, path) or []
            left = [value for value in left if not any(same(value, one) for one in values)]
            if not values:
                rest.append(part)
    return [{"enum": left}, *rest] if left else [False]


def _only_values(schema: Json, path: str) -> list[Json] | None:
    """Return all valid values of a schema that lists few values and otherwise has at most `type`; None for others."""
    if not isinstance(schema, dict) or schema.keys() - {"type", "enum", "const"} - NOTES:
        return None
    values = listed_values(schema, path)
    if values is None or len(values) > MAX_INTERSECTED_VALUES:
        return None
    return values if "type" not in schema else [one for one in values if is_of(one, kinds(schema, path))]


def _common_types(one: frozenset[str], other: frozenset[str]) -> frozenset[str]:
    found = one & other
    integers = ("integer" in one and "number" in other) or ("number" in one and "integer" in other)
    return found | {"integer"} if integers else found


def _pick(choose: Callable[[list[float]], float]) -> Callable[[Json, Json], Json]:
    def combined(one: Json, other: Json) -> Json:
        if any(isinstance(value, bool) or not isinstance(value, int | float) for value in (one, other)):
            raise Unsupported("limits that are numbers")
        return choose([one, other])  # type: ignore[list-item]

    return combined


def _joined(one: Json, other: Json) -> Json:
    if not isinstance(one, list) or not isinstance(other, list):
        raise Unsupported("lists of names and of schemas")
    return [*one, *(value for value in other if not any(same(value, mine) for mine in one))]


def _neither(one: Json, other: Json) -> Json:
    """Merge two `not`: exclude the values that either of them lists."""
    if not isinstance(one, dict) or not isinstance(other, dict) or not (lists_only(one) and lists_only(other)):
        raise Unsupported("schemas that do not demand two of 'not' at once, unless both list values")
    return {"enum": _joined(one["enum"], other["enum"])}


_COMBINED: Final[dict[str, Callable[[Json, Json], Json]]] = {
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"), _pick(max)),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"), _pick(min)),
    **dict.fromkeys(("required", "allOf"), _joined),
    "minContains": _pick(max),
    "maxContains": _pick(min),
    "not": _neither,
}
_MERGED: Final = frozenset(
    {
        *("properties", "additionalProperties", "patternProperties", "type", "items", "prefixItems", "const", "enum"),
    }
)
