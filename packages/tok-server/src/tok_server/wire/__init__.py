"""JSON over HTTP: request bodies, query parameters, errors, and encoding of responses."""

from __future__ import annotations

from tok_server.wire.errors import (
    NOT_SERVED,
    SERVER,
    ApiError,
    from_exception,
    internal,
    invalid,
    limited,
    not_served,
    too_large,
    unavailable,
)
from tok_server.wire.ids import fingerprint, new_id
from tok_server.wire.json import BadJson, decode, encode
from tok_server.wire.json_limits import check_json
from tok_server.wire.json_pieces import (
    encode_elements,
    fill_lists,
    free_gradually,
    join_with_commas,
    next_piece,
    pop_slices,
    slices,
    split_at_list,
)
from tok_server.wire.openapi import JSON, Handler, Media, Operation, json_of, json_or_events, openapi_document, raw
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
    "encode",
    "encode_elements",
    "fill_lists",
    "fingerprint",
    "free_gradually",
    "from_exception",
    "internal",
    "invalid",
    "join_with_commas",
    "json_of",
    "json_or_events",
    "limited",
    "new_id",
    "next_piece",
    "not_served",
    "openapi_document",
    "pop_slices",
    "raw",
    "read_query",
    "slices",
    "split_at_list",
    "too_large",
    "unavailable",
]
