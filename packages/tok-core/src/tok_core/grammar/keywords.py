"""Keywords: those of JSON Schema that a grammar can say, what has no effect on the answer, and two schemas in one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from tok_core.grammar.characters import Unsupported

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
Schema = Mapping[str, Json]

TYPES: Final = ("object", "array", "string", "number", "integer", "boolean", "null")
OF_TYPE: Final[dict[str, frozenset[str]]] = {
    "object": frozenset({"properties", "required", "additionalProperties", "minProperties", "maxProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
}
ANY_TYPE: Final = frozenset({"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"})
NOTES: Final = frozenset(
    {
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$schema"),
        *("$comment", "$defs", "definitions", "contentEncoding", "contentMediaType", "discriminator"),
    }
)
"""Keywords without an effect on what is valid; those that begin with "x-" have none, either."""
SUPPORTED: Final = ANY_TYPE.union(*OF_TYPE.values())


def constraints(schema: Json, path: str) -> dict[str, Json]:
    """What the schema demands, without its notes. Errors: Unsupported naming a keyword that no grammar says."""
    if schema is True:
        return {}
    if schema is False:
        return {"enum": []}
    if not isinstance(schema, dict):
        raise Unsupported(f"a schema, an object or true or false, at {path}")
    found = {}
    for name, value in schema.items():
        if name in SUPPORTED:
            found[name] = value
        elif name in _NEUTRAL and value in _NEUTRAL[name]:
            if name == "unevaluatedProperties" and "additionalProperties" not in schema:
                found["additionalProperties"] = False
            if name == "unevaluatedItems" and "items" not in schema:
                found["items"] = False
        elif name == "uniqueItems" and value is True and schema.get("maxItems") in (0, 1):
            continue  # one item is unique
        elif name not in NOTES and not name.startswith("x-") and (name, path) != ("$id", "$"):
            raise Unsupported(f"schemas without {name[:80]!r} (at {path}), which a grammar cannot say")
    return found


_NEUTRAL: Final[dict[str, tuple[Json, ...]]] = {
    "uniqueItems": (False,),
    "unevaluatedProperties": (False,),
    "unevaluatedItems": (False,),
    "nullable": (False,),
}
"""Values with which keywords are taken that are refused otherwise."""


def kinds(schema: Schema, path: str) -> frozenset[str]:
    """The types that the schema allows: those it names, else those that its keywords are about, else all."""
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
    """A schema, without notes, that is valid where both are. Errors: Unsupported where a grammar cannot say that."""
    found: dict[str, Json] = dict(one)
    for name, value in other.items():
        if name not in found or found[name] == value:
            found[name] = value
        elif name in _COMBINED:
            found[name] = _COMBINED[name](found[name], value)
        elif name not in ("properties", "additionalProperties", "type", "items", "prefixItems", "const", "enum"):
            raise Unsupported(f"schemas that do not demand two of {name!r} at once (at {path})")
    if "type" in one and "type" in other:
        found["type"] = list[Json](sorted(_common_types(kinds(one, path), kinds(other, path))))
    if "items" in one and "items" in other:
        found["items"] = _all_of(one["items"], other["items"])
    if "prefixItems" in one or "prefixItems" in other:
        found["prefixItems"] = _prefix_items(one, other)
    if "properties" in one or "properties" in other:
        found["properties"] = _properties(one, other, path)
    if "additionalProperties" in one and "additionalProperties" in other:
        found["additionalProperties"] = _all_of(one["additionalProperties"], other["additionalProperties"])
    lists = [values for schema in (one, other) if (values := listed_values(schema, path)) is not None]
    if lists:
        found.pop("const", None)
        found["enum"] = [value for value in lists[0] if all(any(same(value, x) for x in more) for more in lists[1:])]
    return found


def listed_values(schema: Schema, path: str) -> list[Json] | None:
    """The values of `enum` or `const`, if there are any."""
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


def _finite(value: Json) -> bool:
    """Whether no number in it is beyond what JSON's readers hold."""
    if isinstance(value, list):
        return all(map(_finite, value))
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    return not isinstance(value, float) or math.isfinite(value)


def properties_of(schema: Schema, path: str) -> dict[str, Json]:
    """The schemas of `properties`, by name."""
    found = schema.get("properties", {})
    if not isinstance(found, dict):
        raise Unsupported(f"properties as an object (at {path})")
    return found


def required_by(schema: Schema, path: str) -> set[str]:
    """The names of `required`."""
    found = schema.get("required", [])
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise Unsupported(f"required as a list of names (at {path})")
    return set(map(str, found))


def same(one: Json, other: Json) -> bool:
    """Whether two values are the same to JSON Schema: 1 and 1.0 are, 1 and true are not."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def kind_of(value: Json) -> str:
    """The type of a value, "integer" for numbers without a fraction."""
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


def _properties(one: Schema, other: Schema, path: str) -> dict[str, Json]:
    """Those of both; one that only one of them names has to be what the other demands of further ones."""
    mine, theirs = properties_of(one, path), properties_of(other, path)
    found: dict[str, Json] = {}
    for name in [*mine, *(name for name in theirs if name not in mine)]:
        parts = []
        for schema, properties in ((one, mine), (other, theirs)):
            if name in properties:
                parts.append(properties[name])
            elif "additionalProperties" in schema:
                parts.append(schema["additionalProperties"])
        found[name] = parts[0] if len(parts) == 1 else _all_of(*parts)
    return found


def _prefix_items(one: Schema, other: Schema) -> list[Json]:
    """Those of both, place by place; where only one of them has a place, it has to be what the other says of items."""
    mine, theirs = one.get("prefixItems", []), other.get("prefixItems", [])
    if not isinstance(mine, list) or not isinstance(theirs, list):
        raise Unsupported("prefixItems as a list of schemas")
    count = max(len(mine), len(theirs))
    here = [*mine, *[one.get("items", True)] * (count - len(mine))]
    there = [*theirs, *[other.get("items", True)] * (count - len(theirs))]
    return [_all_of(*pair) for pair in zip(here, there, strict=True)]


def _all_of(*parts: Json) -> Json:
    distinct = [part for index, part in enumerate(parts) if part is not True and part not in parts[:index]]
    if False in [part for part in distinct if isinstance(part, bool)]:
        return False
    return True if not distinct else distinct[0] if len(distinct) == 1 else {"allOf": distinct}


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
    return [*one, *(value for value in other if value not in one)]


_COMBINED: Final[dict[str, Callable[[Json, Json], Json]]] = {
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"), _pick(max)),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"), _pick(min)),
    **dict.fromkeys(("required", "allOf"), _joined),
}
