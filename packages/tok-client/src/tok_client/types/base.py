"""Base of the wire types, which distinguish absent, null and present fields.

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
"""A JSON object whose members are not validated."""


class Wire(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all wire types. Decoding is strict about types; unknown fields are ignored."""


@lru_cache(maxsize=64)
def known_fields(wire_type: type[msgspec.Struct]) -> frozenset[str]:
    """Return the wire names of all fields of `wire_type`, so that a server can report the fields it ignores."""
    names = frozenset(field.encode_name for field in msgspec.structs.fields(wire_type))
    tag = wire_type.__struct_config__.tag_field
    return names | {tag} if tag else names


__all__ = ["UNSET", "JSONObject", "Maybe", "UnsetType", "Wire", "known_fields"]
