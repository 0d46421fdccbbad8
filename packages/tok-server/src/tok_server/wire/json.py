"""Decode JSON to wire types, with errors that name the field; encode wire types to JSON; make their ids."""

from __future__ import annotations

import os
import random
import re
from codecs import BOM_UTF8
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from typing import TypeVar

import msgspec
from aiohttp import web

from tok_client.decoders import decoder
from tok_client.types import known_fields
from tok_server.wire.errors import ApiError
from tok_server.wire.type_errors import explain_type_error

T = TypeVar("T")

_AT = re.compile(r"^(?P<what>.*) - at `\$(?P<path>.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<field>.*)`")
_ENDS_IN_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}[^\\]{0,5}\Z")  # msgspec expects six more bytes
encode = msgspec.json.Encoder().encode

_RANDOM = random.Random()  # seeded by the system once: a system call per id may block
os.register_at_fork(after_in_child=_RANDOM.seed)  # else both processes would produce the same ids


class BadJson(ApiError):
    """Invalid JSON, or JSON of the wrong types (400); `param` names the member ("messages[0].role")."""

    def __init__(self, path: str | None, message: str) -> None:
        if path:
            message = f"{path} {message}" if message.startswith(("is ", "holds ")) else f"{path}: {message}"
        super().__init__(400, message, param=path)


def json_response(value: msgspec.Struct, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Return the response whose body is `value`."""
    return web.Response(status=status, body=encode(value), content_type="application/json", headers=headers)


def decode(data: bytes | msgspec.Raw, kind: type[T]) -> T:
    """Return `data` decoded as `kind`. Errors: BadJson."""
    try:
        return decoder(kind).decode(data)
    except msgspec.ValidationError as error:
        raise _with_path(str(error), kind) from error
    except msgspec.DecodeError as error:
        raise BadJson(None, f"the body is not valid JSON: {_reason(bytes(data), error)}") from error
    except RecursionError as error:
        raise BadJson(None, "the body is nested too deeply") from error


def _reason(data: bytes, error: msgspec.DecodeError) -> str:
    """Return why `data` is no JSON, in place of two messages of msgspec that hide the reason."""
    if data.startswith(BOM_UTF8):
        return "it begins with a byte order mark, which JSON must not have"
    if str(error) == "Input data was truncated" and _ENDS_IN_SURROGATE.search(data[-16:]):
        return "a text ends with half of a surrogate pair"
    return str(error)


def _with_path(message: str, kind: type) -> BadJson:
    """Return the error with its path: msgspec's, the missing field's, or the field that the message begins with."""
    found = _AT.match(message)
    what, full_path = (found["what"], found["path"]) if found else (message, "")
    path = _field_path(full_path)
    missing = _MISSING.match(what)
    if missing:
        return BadJson(".".join(filter(None, [path, missing["field"]])), "is required, but missing")
    first = what.partition(" ")[0]
    if not path and isinstance(kind, type) and issubclass(kind, msgspec.Struct) and first in known_fields(kind):
        return _unprefixed(first, what)
    explained = explain_type_error(what, kind, full_path)
    return BadJson(path or None, explained if path or explained == what else f"the JSON {explained}")


def _field_path(path: str) -> str:
    """Return the path as errors name it. msgspec writes keys of a mapping as "[...]": the path ends at the mapping."""
    return path.partition("[...]")[0].removeprefix(".")


def _unprefixed(field: str, what: str) -> BadJson:
    return BadJson(field, what.removeprefix(f"{field} "))


def new_id(prefix: str, separator: str = "-") -> str:
    """Return a fresh id such as "cmpl-5f0c…"."""
    return f"{prefix}{separator}{_RANDOM.getrandbits(96):024x}"


@cache
def fingerprint() -> str:
    """Return the engine's version as a fingerprint: it changes when answers to the same seed may change."""
    return f"tok-{version('tok-core')}"
