"""Hypothesis strategies for fuzzing parsers: JSON of any shape, mutated valid JSON, bytes.

The environment variable TOK_FUZZ (default 1) multiplies the number of examples.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

F = TypeVar("F", bound=Callable[..., object])

FACTOR = int(os.environ.get("TOK_FUZZ", "1"))

TEXTS = st.text(st.characters(), max_size=20) | st.sampled_from(
    ["", "\x00", "\ud800", "\udc00\ud800", "\u2028", "\ufffe", "a\u0301" * 50, "{{ 1 }}", "%s{}", "é€𝄞", "x" * 3000]
)
NUMBERS = (
    st.integers(-3, 3) | st.integers() | st.floats() | st.sampled_from([1 << 31, 1 << 63, 1 << 64, -(1 << 63), 1e308])
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)
"""Values of JSON, and NaN and infinities, which Python writes although JSON lacks them."""


def fuzzed(examples: int) -> Callable[[F], F]:
    """Return a decorator, to stand above `given`, that makes a test try `examples` × TOK_FUZZ examples."""
    health = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=examples * FACTOR, deadline=None, suppress_health_check=health)


@st.composite
def changed(draw: st.DrawFn, valid: Sequence[Any]) -> Any:
    """Return one of the values with a few mutations: parts replaced, removed, doubled, or given more members."""
    value = json.loads(json.dumps(draw(st.sampled_from(valid))))
    for _ in range(draw(st.integers(1, 3))):
        value = _change(draw, value)
    return value


def _change(draw: st.DrawFn, value: Any) -> Any:
    keys: Sequence[Any] = (
        list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    if not keys or draw(st.integers(0, 3)) == 0:
        return _replace(draw, value)
    key = draw(st.sampled_from(keys))
    value[key] = _change(draw, value[key])
    return value


def _replace(draw: st.DrawFn, value: Any) -> Any:
    match draw(st.integers(0, 4)):
        case 0:
            return draw(VALUES)
        case 1:
            return [value]
        case 2 if isinstance(value, dict):
            return {**value, draw(TEXTS): draw(VALUES)}
        case 3 if isinstance(value, dict) and value:
            gone = draw(st.sampled_from(list(value)))
            return {key: one for key, one in value.items() if key != gone}
        case 2 | 3 if isinstance(value, list):
            return [*value, *value] if value else [draw(VALUES)]
        case 4 if isinstance(value, str):
            return value + draw(TEXTS)
        case 4 if isinstance(value, int | float) and not isinstance(value, bool):
            return draw(NUMBERS)
        case _:
            return draw(VALUES)


def written(value: object) -> bytes:
    """Return the value as JSON, with lone surrogates as escapes."""
    return json.dumps(value).encode()


@st.composite
def torn(draw: st.DrawFn, valid: Sequence[bytes]) -> bytes:
    """Return one of the texts with bytes removed, inserted or changed."""
    data = bytearray(draw(st.sampled_from(valid)))
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(data)))
        data[place : place + draw(st.integers(0, 4))] = draw(st.binary(max_size=4))
    return bytes(data)


def tokens(words: Sequence[str], most: int) -> st.SearchStrategy[str]:
    """Return a strategy for texts of these words in any order, and of other characters."""
    return st.lists(st.sampled_from(words) | st.text(st.characters(), max_size=2), max_size=most).map("".join)
