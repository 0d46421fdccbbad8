"""Tests of arguments that both clients refuse, by name and before anything is sent."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tok_client import AsyncClient, Client
from tok_client import types as wire


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base_url": "127.0.0.1:10210"}, "base_url is '127.0.0.1:10210'"),
        ({"base_url": None}, "base_url is None"),
        ({"base_url": "http:///v1"}, "base_url is 'http:///v1'"),
        ({"base_url": "http://host:99999/v1"}, "base_url is 'http://host:99999/v1'"),
        ({"base_url": "http://[::1/v1"}, "base_url is 'http://[::1/v1'"),
        ({"base_url": "http://host/v1?key=1"}, "base_url is 'http://host/v1?key=1'"),
        ({"base_url": "http://host/v1\n"}, r"base_url is 'http://host/v1\n'"),
        ({"api_key": "secret\n"}, "api_key is '***'; allowed: a text of printable ASCII"),
        ({"api_key": "schlüssel"}, "api_key is '***'"),
        ({"api_key": b"secret"}, "api_key is '***'"),
        ({"backoff": 1}, "backoff is 1; allowed: a Backoff"),
        ({"timeout": None}, "timeout is None"),
        ({"max_retries": "2"}, "max_retries is '2'"),
        ({"max_retries": float("nan")}, "max_retries is nan"),
        ({"timeout": 0}, "timeout is 0"),
        ({"timeout": float("inf")}, "timeout is inf"),
        ({"max_retries": -1}, "max_retries is -1"),
    ],
)
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_clients_refuse_invalid_arguments_by_name(
    kind: Callable[..., object], options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        kind(**options)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompt": b"Hi"}, "prompt is of the type bytes"),
        ({"prompt": None}, "prompt is of the type NoneType; allowed: a text,"),
        ({"prompt": range(3)}, "prompt is of the type range"),
        ({"stop": {"a", "b"}}, "stop is of the type set"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias.5 is nan"),
        ({"response_format": {"a": [1, {"b": float("inf")}]}}, "response_format.a[1].b is inf"),
        ({"stop_when": wire.FirstMatch(pattern=b"x")}, "stop_when.pattern is of the type bytes"),  # type: ignore[arg-type]
        ({"seed": object()}, "seed cannot be sent: Encoding objects of type object is unsupported"),
        ({"extra_body": {"zeta": float("nan")}}, "zeta is nan"),
        ({"extra_body": [1]}, "extra_body is of the type list"),
        ({"timeout": "5"}, "timeout is '5'"),
    ],
)
async def test_values_that_json_cannot_express_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    async with AsyncClient("http://127.0.0.1:1/v1", max_retries=0) as client:  # sending raises another error
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            await client.completions.create(**{"model": "m", "prompt": "a", **values})
        with pytest.raises(TypeError, match=re.escape("messages[0].content is of the type bytes")):
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": b"a"}])
        with pytest.raises(ValueError, match="model is 5; allowed: an id"):
            await client.models.retrieve(5)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="request_ids is one text"):
            await client.rl.abort_requests("request-1")
