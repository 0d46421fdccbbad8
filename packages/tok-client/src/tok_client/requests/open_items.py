"""Decode responses whose items or content parts have unknown types; these are kept as JSON objects."""

from __future__ import annotations

from typing import TypeVar, cast

import msgspec

from tok_client.decoders import decoder
from tok_client.types import AnyItem, JSONObject, OutputItem, Response, ResponseEvent

T = TypeVar("T")

# These stand for an item and a part of unknown type while the rest of an event is decoded.
_PLACEHOLDER_ITEM: JSONObject = {"type": "reasoning", "id": "", "status": "completed"}
_PLACEHOLDER_PART: JSONObject = {"type": "reasoning_text", "text": ""}


def open_response(data: bytes) -> Response:
    """Return the response encoded in `data`. Errors: msgspec.MsgspecError."""
    return _response(_object(msgspec.json.decode(data)))


def open_event(data: bytes) -> ResponseEvent:
    """Return the event encoded in `data`. Errors: msgspec.MsgspecError, also for an event of unknown type."""
    decoded = _object(msgspec.json.decode(data))
    if "response" in decoded:
        response = _object(decoded["response"])
        event = _event({**decoded, "response": {**response, "output": []}})
        return msgspec.structs.replace(event, response=_response(response))
    if "item" in decoded:
        return msgspec.structs.replace(_event({**decoded, "item": _PLACEHOLDER_ITEM}), item=_item(decoded["item"]))
    if "part" in decoded:
        return msgspec.structs.replace(_event({**decoded, "part": _PLACEHOLDER_PART}), part=_object(decoded["part"]))
    return _event(decoded)


def _response(decoded: JSONObject) -> Response:
    items = msgspec.convert(decoded.get("output", []), list[object])
    response = _converted({**decoded, "output": []}, Response)
    return msgspec.structs.replace(response, output=[_item(item) for item in items])


def _item(decoded: object) -> AnyItem:
    try:
        return _converted(decoded, cast("type[OutputItem]", OutputItem))
    except msgspec.ValidationError:
        return _object(decoded)


def _event(decoded: JSONObject) -> ResponseEvent:
    return _converted(decoded, cast("type[ResponseEvent]", ResponseEvent))


def _converted(decoded: object, kind: type[T]) -> T:
    decoder(kind)  # fills msgspec's cache of type information under a lock, see `tok_client.decoders`
    return msgspec.convert(decoded, kind)


def _object(decoded: object) -> JSONObject:
    return msgspec.convert(decoded, JSONObject)
