"""Encode keyword parameters as JSON; absent and `UNSET` parameters are not sent, None is sent as null."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec

Object = Mapping[str, object]


def body_of(kind: Callable[..., msgspec.Struct], params: Object, extra: Object | None = None) -> bytes:
    """Return the JSON of a `kind` with the fields `params`, and with the members of `extra` added unchanged.

    TypeError: a parameter is unknown to the API or holds a value that JSON cannot express. ValueError: a parameter
    holds a number that is NaN or infinite, or a lone surrogate.
    """
    if not isinstance(extra, Mapping | None):
        raise TypeError(f"extra_body is of the type {type(extra).__name__}; allowed: a mapping")
    for name, value in (*params.items(), *(extra or {}).items()):
        _check(name, value)
    request = kind(**params)
    try:
        if not extra:
            return msgspec.json.encode(request)
        return msgspec.json.encode({**msgspec.to_builtins(request), **extra})
    except UnicodeEncodeError:
        raise _surrogate_error(_invalid_param({**params, **(extra or {})})) from None
    except TypeError as error:
        raise TypeError(f"{_invalid_param({**params, **(extra or {})})} cannot be sent: {error}") from None


def _check(name: str, value: object) -> None:
    """Raise an error about `name` if `value` holds what msgspec would change: NaN to null, bytes to base64."""
    if isinstance(value, str | int | None):
        return
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is {value}; allowed: finite numbers")
    if isinstance(value, bytes | bytearray | memoryview | set | frozenset):
        raise TypeError(f"{name} is of the type {type(value).__name__}; allowed: values that JSON can express")
    if isinstance(value, Mapping):
        for key, member in value.items():
            _check(f"{name}.{key}", member)
    elif isinstance(value, msgspec.Struct):
        for field in value.__struct_fields__:
            _check(f"{name}.{field}", getattr(value, field))
    elif isinstance(value, list | tuple) and not set(map(type, value)) <= {int, str}:  # else maybe a million token ids
        for index, member in enumerate(value):
            _check(f"{name}[{index}]", member)


def path_of(collection: str, name: str, value: str, rest: str = "") -> str:
    """Return the path of the member `value` of a collection. ValueError: it is no text, is empty or has a surrogate."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} is {value!r}; allowed: an id")
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
    """Return the name of the parameter that cannot be encoded."""
    for name, value in params.items():
        try:
            msgspec.json.encode({name: value})
        except (UnicodeEncodeError, TypeError):
            return ascii(name).strip("'")
    return "extra_body"


def _surrogate_error(name: str) -> ValueError:
    return ValueError(
        f"{name} has a lone surrogate (half of a UTF-16 pair), which UTF-8 cannot encode; allowed: valid text"
    )
