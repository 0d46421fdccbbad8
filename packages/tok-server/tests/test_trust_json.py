"""Hostile JSON bodies are answered or refused, and never cause a server error."""

from __future__ import annotations

import pytest

from support.serving import Server

PATHS = ("/v1/completions", "/v1/chat/completions")
GOOD = b'"prompt":"one","messages":[{"role":"user","content":"one"}],"max_tokens":1'

VALUES = {
    "lone surrogate": rb'"\ud800"',
    "reversed surrogates": rb'"\udc00\ud800"',
    "NUL": rb'"a\u0000b"',
    "line separators": '"\u2028\u2029"'.encode(),
    "not a character": rb'"\uffff\ufffe"',
    "right to left": '"\u202eabc"'.encode(),
    "combining": ('"' + "a" + "\u0301" * 10_000 + '"').encode(),
    "huge integer": b"9" * 5000,
    "huge exponent": b"1e999999",
    "tiny": b"1e-999999",
    "minus zero": b"-0.0",
    "NaN": b"NaN",
    "Infinity": b"-Infinity",
    "deep lists": b"[" * 100_000 + b"]" * 100_000,
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "unclosed": b"[" * 100_000,
    "many keys": b"{" + b",".join(b'"%d":1' % i for i in range(20_000)) + b"}",
    "template": b"\"{{ ''.__class__ }}{% for i in range(99999) %}x{% endfor %}\"",
    "path": b'"../../../../etc/passwd\\u0000.txt"',
    "regular expression": b'"(a+)+$((((((((((x*)*)*)*)*)*)*)*)*)*"',
    "format": b'"%s%n{0.__class__}{}"',
    "boolean": b"true",
    "null": b"null",
}
FIELDS = (
    *("prompt", "messages", "model", "n", "max_tokens", "temperature", "top_p", "stop", "seed", "logit_bias", "user"),
    *("stream", "stream_options", "logprobs", "response_format", "tools", "tool_choice", "metadata", "no_such_field"),
    *("stream_options.no_such_field", "response_format.json_schema", "metadata.key"),
)


def member(field: str, raw: bytes) -> bytes:
    """Return the field with the value `raw`; "a.b" means the field b within a."""
    outer, dot, inner = field.partition(".")
    return b'"%b":%b' % (outer.encode(), b'{"%b":%b}' % (inner.encode(), raw) if dot else raw)


@pytest.mark.parametrize("value", VALUES)
def test_no_field_value_causes_a_server_error(server: Server, value: str) -> None:
    raw = VALUES[value]
    for path in PATHS:
        for field in FIELDS:
            # The last of two keys of the same name counts, as everywhere in JSON.
            answer = server.call("POST", path, b"{%b,%b}" % (GOOD, member(field, raw)))
            assert answer.status in (200, 400, 404), (path, field, answer.body[:500])
            if answer.status != 200:
                assert len(answer.body) < 5000
                answer.error()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'"x"',
        b"null",
        b"\xff\xfe{\x00}\x00",
        b"\xef\xbb\xbf{}",
        b"{" * 300_000,
        b'{"prompt"',
        b"\x00" * 100,
    ],
)
def test_malformed_body_gets_400(server: Server, body: bytes) -> None:
    for path in PATHS:
        answer = server.call("POST", path, body)
        assert answer.status == 400, answer.body
        answer.error()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (rb'{"prompt": "cut: \ud83d"}', "a text ends with half of a surrogate pair"),
        (rb'{"messages": [{"role": "user", "content": "cut: \uD83D"}]}', "a text ends with half of a surrogate pair"),
        (b'{"prompt": "cut', "Input data was truncated"),
        (b'\xef\xbb\xbf{"prompt": "one"}', "it begins with a byte order mark, which JSON must not have"),
    ],
)
def test_the_error_of_malformed_json_says_what_is_wrong(server: Server, body: bytes, reason: str) -> None:
    path = "/v1/chat/completions" if b"messages" in body else "/v1/completions"
    answer = server.call("POST", path, body)
    assert answer.status == 400
    assert answer.error()["message"] == f"the body is not valid JSON: {reason}"
