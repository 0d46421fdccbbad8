"""Array types of messages, and messages encoded as msgpack with arrays as raw bytes."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]


def array(values: object, dtype: type = np.int32) -> np.ndarray:
    """Return a sequence as a one-dimensional array of `dtype`."""
    return np.asarray(values, dtype=dtype)


EMPTY: Int32 = np.empty(0, np.int32)


def _enc(value: object) -> object:
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, np.ascontiguousarray(value).data)
    raise TypeError(f"cannot send {type(value).__name__}")


def _dec(kind: type, value: Any) -> object:
    if kind is np.ndarray:
        dtype, shape, data = value
        return np.frombuffer(data, dtype=dtype).reshape(shape)
    raise TypeError(f"cannot receive {kind.__name__}")


def encode(message: msgspec.Struct | Sequence[msgspec.Struct]) -> bytes:
    """Encode one message, or a sequence of messages."""
    return msgspec.msgpack.encode(message, enc_hook=_enc)


# msgspec (0.22) caches type information on each Struct class and publishes it half-built: a second thread that reads it
# at that moment crashes the process.
_MAKING = Lock()


def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return a decoder of one message type or a union of tagged ones; decoded arrays are read-only."""
    with _MAKING:
        return msgspec.msgpack.Decoder(kind, dec_hook=_dec)
