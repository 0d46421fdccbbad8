"""Cache one JSON decoder per type, created under a lock.

msgspec (0.22) caches type information with the Struct class, and at first the cached information is incomplete. Another
thread that uses it at that moment crashes the process.
"""

from __future__ import annotations

from threading import Lock
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_decoders: dict[object, msgspec.json.Decoder[Any]] = {}
_lock = Lock()


def decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """Return the decoder of `kind`. Afterwards `msgspec.convert` to the same type is safe in any thread, too."""
    cached = _decoders.get(kind)
    if cached is None:
        with _lock:
            cached = _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    return cached
