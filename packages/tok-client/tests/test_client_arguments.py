"""Tests of arguments that both clients refuse, by name and before anything is sent."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tok_client import AsyncClient, Client


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base_url": "127.0.0.1:10210"}, "base_url is '127.0.0.1:10210'"),
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
