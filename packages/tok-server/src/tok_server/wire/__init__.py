"""JSON over HTTP: request bodies, query parameters, errors, and encoding of responses."""

from __future__ import annotations

from tok_server.wire.errors import (
    NOT_SERVED,
    SERVER,
    ApiError,
    internal,
    invalid,
    limited,
    not_served,
    of_exception,
    too_large,
    unavailable,
)
from tok_server.wire.ids import fingerprint, new_id
from tok_server.wire.json import BadJson, decode, encode
from tok_server.wire.json_limits import check_json
from tok_server.wire.json_pieces import elements, filled, free, next_piece, separated, slices, split, taken
from tok_server.wire.openapi import JSON, Handler, Media, Operation, document, json_of, json_or_events, raw
from tok_server.wire.query import read_query
from tok_server.wire.text_event import TextEvent

__all__ = [
    "JSON",
    "NOT_SERVED",
    "SERVER",
    "ApiError",
    "BadJson",
    "Handler",
    "Media",
    "Operation",
    "TextEvent",
    "check_json",
    "decode",
    "document",
    "elements",
    "encode",
    "filled",
    "fingerprint",
    "free",
    "internal",
    "invalid",
    "json_of",
    "json_or_events",
    "limited",
    "new_id",
    "next_piece",
    "not_served",
    "of_exception",
    "raw",
    "read_query",
    "separated",
    "slices",
    "split",
    "taken",
    "too_large",
    "unavailable",
]
