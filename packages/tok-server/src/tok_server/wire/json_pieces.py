"""Write large JSON responses piece by piece, so that neither a piece nor its encoding blocks other requests.

The envelope is encoded with empty lists, and cut where their elements belong:

    {"id": …, "choices":[      elements of the list, some at a time      ], "usage": …}
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from tok_server.wire.json import encode

T = TypeVar("T")

MIN_PIECE_BYTES = 1 << 17  # bytes sent together, at least
ENTRIES_PER_SLICE = 256  # log-probability entries encoded together: each may have 20 top tokens, 500 KB in all


def split_at_list(envelope: bytes, name: str) -> tuple[bytes, bytes]:
    """Cut an encoded object in the first empty list called `name`. Strings cannot match: their quotes are escaped."""
    mark = b'"%b":[' % name.encode()
    at = envelope.index(mark + b"]") + len(mark)
    return envelope[:at], envelope[at:]


def fill_lists(envelope: bytes, lists: Iterable[tuple[str, Iterable[bytes]]]) -> Iterator[bytes]:
    """Yield the object with its empty lists filled. `lists` names them in the order of the object's members."""
    for name, encode_elements in lists:
        before, envelope = split_at_list(envelope, name)
        yield before
        yield from encode_elements
    yield envelope


def join_with_commas(items: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """Yield the pieces of all items, with commas between the items."""
    for number, pieces in enumerate(items):
        if number:
            yield b","
        yield from pieces


def encode_elements(parts: Iterable[list[T]]) -> Iterator[bytes]:
    """Yield the elements of all lists as one list's elements, encoding one list at a time."""
    return join_with_commas((encode(part)[1:-1],) for part in parts if part)


def slices(values: list[T], size: int = ENTRIES_PER_SLICE) -> Iterator[list[T]]:
    """Yield the values, `size` at a time."""
    return (values[start : start + size] for start in range(0, len(values), size))


def pop_slices(values: list[T], size: int = ENTRIES_PER_SLICE) -> Iterator[list[T]]:
    """Yield the values, `size` at a time, and free them: freeing millions at once holds the GIL."""
    values.reverse()
    while values:
        part = values[-size:]
        del values[-size:]
        part.reverse()
        yield part


def free_gradually(values: list[T] | None) -> None:
    """Empty the list gradually: freeing millions of values at once holds the GIL."""
    while values:
        del values[-64 * ENTRIES_PER_SLICE :]


def next_piece(pieces: Iterator[bytes]) -> bytes:
    """Return the next `MIN_PIECE_BYTES` bytes or more; fewer at the end, and b"" after it."""
    found, size = [], 0
    for piece in pieces:
        found.append(piece)
        size += len(piece)
        if size >= MIN_PIECE_BYTES:
            break
    return b"".join(found)
