"""Decoders of JSON, one for each type, made under a lock.

What msgspec (0.22) finds out about a Struct it keeps with the class, half-made at first: another thread that meets it
then crashes the process.
"""

from __future__ import annotations

from threading import Lock
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_made: dict[object, msgspec.json.Decoder[Any]] = {}
_making = Lock()


def decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """The decoder to `kind`. Once it is made, `msgspec.convert` to the same type is safe in any thread, too."""
    found = _made.get(kind)
    if found is None:
        with _making:
            found = _made.setdefault(kind, msgspec.json.Decoder(kind))
    return found
