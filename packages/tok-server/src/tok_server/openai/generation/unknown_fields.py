"""Find unknown fields at any depth of a request: they have no effect, and a header of the answer names them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from heapq import nsmallest
from itertools import chain, islice

import msgspec
from msgspec.inspect import ListType, StructType, Type, UnionType, VarTupleType

from tok_client.types import known_fields
from tok_server.http import Members
from tok_server.wire import decode

MAX_LISTED_FIELDS = 32  # names that fit into a header


def unknown_fields(request: msgspec.Struct, found: Members, accepted: frozenset[str]) -> tuple[str, ...]:
    """Return the paths of unknown fields ("zeta", "messages[0].foo"), top level first; at most `MAX_LISTED_FIELDS`.

    found     the members of the request's JSON
    accepted  names that count as known, in addition to those of the type
    """
    if found.keys() <= _unchecked_fields(type(request), accepted):
        return ()
    known = known_fields(type(request))
    # Only the smallest names are sorted: sorting all would hold the interpreter lock.
    top_level = nsmallest(MAX_LISTED_FIELDS, found.keys() - known - accepted)
    nested = sorted(name for name in found if name in known and _holds_structs(getattr(request, name)))
    if not top_level and not nested:
        return ()
    nested_paths = chain.from_iterable(
        _nested_unknown_fields(name, getattr(request, name), decode(found[name], object)) for name in nested
    )
    return tuple(islice(chain(top_level, nested_paths), MAX_LISTED_FIELDS))


@cache
def _unchecked_fields(kind: type[msgspec.Struct], accepted: frozenset[str]) -> frozenset[str]:
    """Return names whose values need no check: fields that cannot hold structs, and accepted names outside the type."""
    type_info = msgspec.inspect.type_info(kind)
    assert isinstance(type_info, StructType)
    plain = (one.encode_name for one in type_info.fields if not _may_hold_structs(one.type))
    return (accepted - known_fields(kind)).union(plain)


def _may_hold_structs(kind: Type) -> bool:
    match kind:
        case UnionType(types=types):
            return any(map(_may_hold_structs, types))
        case ListType(item_type=item) | VarTupleType(item_type=item):
            return _may_hold_structs(item)
    return isinstance(kind, StructType)


def _holds_structs(value: object) -> bool:
    """Return whether `value` is a struct or a list of structs: others, such as long prompts, are not decoded again."""
    first = value[0] if isinstance(value, list) and value else value
    return isinstance(first, msgspec.Struct)


def _nested_unknown_fields(path: str, value: object, raw_value: object) -> Iterator[str]:
    """Yield the paths of unknown fields inside `value`. `raw_value`: the JSON from which it was decoded."""
    if isinstance(value, list) and isinstance(raw_value, list):
        for index, (item, raw) in enumerate(zip(value, raw_value, strict=True)):
            yield from _nested_unknown_fields(f"{path}[{index}]", item, raw)
    elif isinstance(value, msgspec.Struct) and isinstance(raw_value, dict):
        known = known_fields(type(value))
        for name, raw in raw_value.items():
            if name in known:
                yield from _nested_unknown_fields(f"{path}.{name}", getattr(value, name), raw)
            else:
                yield f"{path}.{name}"
