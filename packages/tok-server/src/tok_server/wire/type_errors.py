"""Say in plain words which JSON value does not have the type of its field, and which values the field takes.

msgspec writes "Expected `int | null`, got `str`" and "Invalid enum value 'low'". Clients read "is a string; allowed:
integers, null" and "is 'low'; allowed: 'auto', 'none', null".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

import msgspec
from msgspec.inspect import (
    BoolType,
    DictType,
    FloatType,
    IntType,
    ListType,
    LiteralType,
    NoneType,
    StrType,
    StructType,
    Type,
    UnionType,
    VarTupleType,
)

MAX_SHOWN = 80  # characters of a refused value

_MISMATCH = re.compile(r"^Expected `[^`]*`(?:, got `(?P<found>[^`]*)`)?$")
_NOT_LISTED = re.compile(r"^Invalid (?:enum )?value (?P<value>.*)$", re.DOTALL)
_STEP = re.compile(r"\[[^\]]*\]|[^.\[\]]+")  # of a path: "tools[0].type" -> tools, [0], type
_FOUND = {  # msgspec's name of a JSON type -> one value of it, all of them
    "int": ("an integer", "integers"),
    "float": ("a number", "numbers"),
    "str": ("a string", "strings"),
    "bool": ("a boolean", ""),
    "array": ("an array", "arrays"),
    "object": ("an object", "objects"),
    "null": ("null", "null"),
}
_type_info = cache(msgspec.inspect.type_info)


def explain_type_error(message: str, kind: object, path: str) -> str:
    """Return msgspec's `message` about the value at `path` inside a `kind` in plain words; other messages unchanged."""
    refused = ""
    if found := _NOT_LISTED.match(message):
        value = found["value"][:MAX_SHOWN]
    elif found := _MISMATCH.match(message):
        value, refused = _FOUND.get(found["found"], ("of another type", ""))
    else:
        return message
    allowed = allowed_values(kind, path, refused)
    verb = "holds" if path.endswith("[...]") else "is"  # msgspec does not name the keys of a mapping
    return f"{verb} {value}" + (f"; allowed: {allowed}" if allowed else "")


def allowed_values(kind: object, path: str, refused: str = "") -> str:
    """Return in plain words the values that may be at `path` inside a `kind`; "" if the path is unknown.

    refused  word to leave out: of a union's structs, another one than the value's may allow it
    """
    types: list[Type] = [_type_info(kind)]
    for step in _STEP.findall(path):
        types = [inner for one in types for inner in _inside(one, step)]
    words = {word: None for one in types for word in _allowed(one) if word != refused}
    return ", ".join(sorted(words, key="null".__eq__))  # null is last


def _inside(kind: Type, step: str) -> Iterator[Type]:
    """Yield the types that a member ("type"), an item ("[0]") or a mapping's value ("[...]") of `kind` may have."""
    for one in _alternatives(kind):
        match one:
            case ListType(item_type=inner) | VarTupleType(item_type=inner) | DictType(value_type=inner):
                if step.startswith("["):
                    yield inner
            case StructType(tag_field=tag_field, tag=tag) if tag_field == step:
                yield LiteralType((tag,))
            case StructType(fields=fields):
                yield from (field.type for field in fields if field.encode_name == step)


def _allowed(kind: Type) -> Iterator[str]:
    """Yield the words for the values of `kind`."""
    for one in _alternatives(kind):
        match one:
            case LiteralType(values=values):
                yield from map(repr, values)
            case NoneType():
                yield "null"
            case IntType(ge=int(least), le=int(most)):
                yield f"integers from {least} to {most}"
            case IntType():
                yield "integers"
            case FloatType():
                yield "numbers"
            case StrType():
                yield "strings"
            case BoolType():
                yield from ("true", "false")
            case ListType() | VarTupleType():
                yield "arrays"
            case StructType() | DictType():
                yield "objects"


def _alternatives(kind: Type) -> tuple[Type, ...]:
    return kind.types if isinstance(kind, UnionType) else (kind,)
