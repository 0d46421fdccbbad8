"""Decode a URL's query parameters into a struct; refuse unknown, repeated and mistyped ones."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from aiohttp import web

from tok_client.decoders import decoder
from tok_server.wire.errors import invalid

Q = TypeVar("Q", bound=msgspec.Struct)


def read_query(request: web.Request, kind: type[Q]) -> Q:
    """Return the query as a `kind`. Errors: ApiError 400 naming the parameter."""
    values = dict(request.query)
    known = [field.encode_name for field in msgspec.structs.fields(kind)]
    for name in values:
        if name not in known:
            raise invalid(name[:80], f"{name[:80]!r} is not a parameter of this URL; allowed: {', '.join(known)}")
        if len(request.query.getall(name)) > 1:
            raise invalid(name, f"{name} is given twice; allowed: once")
    decoder(kind)  # prepares the type under a lock: the conversion is then safe in any thread
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        message = str(error)
        named = next((name for name in known if f"`$.{name}`" in message), None)
        raise invalid(named, message.replace(f" - at `$.{named}`", f": {named}")) from error
