"""A field may be absent, null, or have a value: three different things on the wire.

`UNSET` stands for absent: it is the default of every optional field, and encoding leaves it out.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TypeVar, Union

import msgspec
from msgspec import UNSET, UnsetType

T = TypeVar("T")

Maybe = Union[T, UnsetType, None]  # noqa: UP007 - a generic alias in the other spelling is no type to mypy
"""An optional field: a value, null, or absent (`UNSET`)."""

JSONObject = dict[str, object]
"""A JSON object whose members are not looked into here."""


class Wire(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all wire types. Decoding is strict about types; fields that nobody defines are ignored."""


@lru_cache(maxsize=64)
def known_fields(wire_type: type[msgspec.Struct]) -> frozenset[str]:
    """The names on the wire of all fields of `wire_type`, so that a server can tell which ones it ignores."""
    names = frozenset(field.encode_name for field in msgspec.structs.fields(wire_type))
    tag = wire_type.__struct_config__.tag_field
    return names | {tag} if tag else names


__all__ = ["UNSET", "JSONObject", "Maybe", "UnsetType", "Wire", "known_fields"]
