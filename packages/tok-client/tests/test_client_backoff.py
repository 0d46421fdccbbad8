"""Tests of retry waits with an injected clock, of which errors are retried, and of error messages."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tok_client import (
    APIConnectionError,
    APIResponseError,
    APIStatusError,
    APITimeoutError,
    Backoff,
    StreamError,
    TokError,
)
from tok_client.errors import event_error, status_error
from tok_client.transport.backoff import may_retry

BROKEN = APIConnectionError("broken")


def retry_after_error(retry_after: str) -> APIStatusError:
    return status_error(429, {"Retry-After": retry_after}, b"")


@pytest.mark.parametrize(("random_number", "waits"), [(0.0, [0.5, 1, 2, 4, 5, 5]), (1.0, [1, 2, 4, 8, 10, 10])])
def test_backoff_doubles_up_to_the_limit_with_half_to_full_jitter(random_number: float, waits: list[float]) -> None:
    backoff = Backoff(first=1, most=10, uniform=lambda: random_number)
    assert [backoff.delay(retry, BROKEN) for retry in range(1, 7)] == waits


@given(st.integers(1, 10**6), st.floats(0, 1, exclude_max=True))
def test_backoff_never_exceeds_the_limit(retry: int, random_number: float) -> None:
    assert 0 < Backoff(uniform=lambda: random_number).delay(retry, BROKEN) <= 8


@pytest.mark.parametrize(
    ("header", "wait"),
    [
        ("3", 3.0),
        ("0.75", 0.75),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 60.0),
        ("Thu, 01 Jan 1970 00:00:10 GMT", 0.25),
        ("0", 0.25),
        ("-5", 0.25),
        ("nan", 0.25),
        ("soon", 0.25),
    ],
)
def test_backoff_honours_retry_after_in_seconds_or_as_a_date(header: str, wait: float) -> None:
    backoff = Backoff(first=0.5, uniform=lambda: 0.0, clock=lambda: 40.0)
    assert backoff.delay(1, retry_after_error(header)) == wait


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (BROKEN, True),
        (APITimeoutError("slow"), False),
        (APIResponseError("garbage"), False),
        (StreamError("failed"), False),
        *((status_error(status, {}, b""), True) for status in (408, 409, 429, 500, 502, 503, 599)),
        *((status_error(status, {}, b""), False) for status in (302, 400, 401, 403, 404, 405, 413, 422, 501)),
    ],
)
def test_only_transient_errors_are_retried(error: TokError, expected: bool) -> None:
    assert may_retry(error) is expected


@pytest.mark.parametrize(
    ("error", "expected"),
    [(BROKEN, False), *((status_error(status, {}, b""), status in (429, 503)) for status in (408, 409, 429, 500, 503))],
)
def test_non_idempotent_calls_are_retried_only_after_429_or_503(error: TokError, expected: bool) -> None:
    assert may_retry(error, repeatable=False) is expected


@pytest.mark.parametrize(
    ("body", "details"),
    [
        (b'{"error":{"message":"bad n","type":"t","param":"n","code":"c"}}', ("bad n", "t", "n", "c")),
        (b'{"error":{"message":"bad","code":400}}', ("bad", None, None, "400")),
        (b'{"error":"overloaded"}', ("overloaded", None, None, None)),
        (b'{"object":"error","message":"bad","type":"t"}', ("bad", "t", None, None)),
        (b'{"detail":[{"loc":["n"]}]}', ('[{"loc":["n"]}]', None, None, None)),
        (b"<h1>Bad Gateway</h1>", ("<h1>Bad Gateway</h1>", None, None, None)),
        (b"\xff", ("\ufffd", None, None, None)),
        (b"", ("no message", None, None, None)),
        (b"[1]", ("no message", None, None, None)),
    ],
)
def test_error_bodies_of_any_form_become_error_messages(body: bytes, details: tuple[str | None, ...]) -> None:
    error = status_error(400, {"x-request-id": "r1"}, body)
    assert (str(error), error.type, error.param, error.code) == (f"400: {details[0]}", *details[1:])
    assert (error.status_code, error.request_id) == (400, "r1")


@pytest.mark.parametrize(
    "error",
    [
        retry_after_error("3"),
        APITimeoutError("slow"),
        APIResponseError("garbage", body=b"x"),
        event_error(b'{"error":{"message":"failed","type":"t","code":7}}'),
    ],
)
def test_errors_survive_pickling(error: TokError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), vars(copy)) == (str(error), vars(error))
