"""Encode messages as msgpack, with arrays as raw bytes."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any

import msgspec
import numpy as np

from tok_core.messages.processes import Beat, EngineInfo, Failed, Silence
from tok_core.messages.reports import Progress
from tok_core.messages.requests import Cancel, Submit
from tok_core.messages.steps import StepOutput

ToManager = Submit | Cancel


ToEngine = Progress | EngineInfo | Failed | Silence


FromProcess = Progress | EngineInfo | Failed | Beat


FromWorker = StepOutput | EngineInfo


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
