"""Decode responses whose items or content parts have unknown types; these are kept as JSON objects."""

from __future__ import annotations

from typing import TypeVar, cast

import msgspec

from tok_client.decoders import decoder
from tok_client.types import AnyItem, JSONObject, OutputItem, Response, ResponseEvent

T = TypeVar("T")

ITEM: JSONObject = {"type": "reasoning", "id": "", "status": "completed"}
PART: JSONObject = {"type": "reasoning_text", "text": ""}
"""Placeholders for an item or a part of unknown type while the rest of an event is decoded."""


def open_response(data: bytes) -> Response:
    """Return the response encoded in `data`. Errors: msgspec.MsgspecError."""
    return _response(_object(msgspec.json.decode(data)))


def open_event(data: bytes) -> ResponseEvent:
    """Return the event encoded in `data`. Errors: msgspec.MsgspecError, also for an event of unknown type."""
    found = _object(msgspec.json.decode(data))
    if "response" in found:
        response = _object(found["response"])
        event = _event({**found, "response": {**response, "output": []}})
        return msgspec.structs.replace(event, response=_response(response))
    if "item" in found:
        return msgspec.structs.replace(_event({**found, "item": ITEM}), item=_item(found["item"]))
    if "part" in found:
        return msgspec.structs.replace(_event({**found, "part": PART}), part=_object(found["part"]))
    return _event(found)


def _response(found: JSONObject) -> Response:
    items = msgspec.convert(found.get("output", []), list[object])
    response = _converted({**found, "output": []}, Response)
    return msgspec.structs.replace(response, output=[_item(item) for item in items])


def _item(found: object) -> AnyItem:
    try:
        return _converted(found, cast("type[OutputItem]", OutputItem))
    except msgspec.ValidationError:
        return _object(found)


def _event(found: JSONObject) -> ResponseEvent:
    return _converted(found, cast("type[ResponseEvent]", ResponseEvent))


def _converted(found: object, kind: type[T]) -> T:
    decoder(kind)  # fills msgspec's cache of type information under a lock, see `tok_client.decoders`
    return msgspec.convert(found, kind)


def _object(found: object) -> JSONObject:
    return msgspec.convert(found, JSONObject)
