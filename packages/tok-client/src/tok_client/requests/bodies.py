"""Encode keyword parameters as JSON; absent and `UNSET` parameters are not sent, None is sent as null."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec

Object = Mapping[str, object]


def body_of(kind: Callable[..., msgspec.Struct], params: Object, extra: Object | None = None) -> bytes:
    """Return the JSON of a `kind` with the fields `params`, and with the members of `extra` added unchanged.

    TypeError: a parameter is unknown to the API or cannot be encoded as JSON. ValueError: a parameter is
    NaN, infinite or has a lone surrogate.
    """
    for name, value in params.items():
        if isinstance(value, float) and not math.isfinite(value):  # JSON has neither: msgspec would send null
            raise ValueError(f"{name} is {value}; allowed: finite numbers")
    request = kind(**params)
    try:
        if not extra:
            return msgspec.json.encode(request)
        return msgspec.json.encode({**msgspec.to_builtins(request), **extra})
    except UnicodeEncodeError:
        raise _surrogate_error(_invalid_param({**params, **(extra or {})})) from None


def path_of(collection: str, name: str, value: str, rest: str = "") -> str:
    """Return the path of the member `value` of a collection. ValueError: it is empty or has a lone surrogate."""
    if not value:
        raise ValueError(f"{name} is ''; allowed: an id")
    from urllib.parse import quote  # slow to import; the HTTP library imports it anyway

    try:
        return f"{collection}/{quote(value, safe='')}{rest}"
    except UnicodeEncodeError:
        raise _surrogate_error(name) from None


def query_of(**params: str | int | Sequence[str] | None) -> str:
    """Return the query of a URL with the parameters that are not None, or "". ValueError: one has a lone surrogate.

    A parameter that is a sequence is given once for each of its values.
    """
    from urllib.parse import urlencode

    try:
        query = urlencode({name: value for name, value in params.items() if value is not None}, doseq=True)
    except UnicodeEncodeError:
        raise _surrogate_error(_invalid_param(params)) from None
    return f"?{query}" if query else ""


def _invalid_param(params: Object) -> str:
    """Return the name of the parameter that is not valid Unicode."""
    for name, value in params.items():
        try:
            msgspec.json.encode({name: value})
        except UnicodeEncodeError:
            return ascii(name).strip("'")
    return "extra_body"


def _surrogate_error(name: str) -> ValueError:
    return ValueError(
        f"{name} has a lone surrogate (half of a UTF-16 pair), which UTF-8 cannot encode; allowed: valid text"
    )
