"""JSON bodies with too many members or levels are refused before decoding, and no others."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.fuzzing import TEXTS, VALUES, fuzzed
from support.serving import Server
from tok_server.http import body as body_module
from tok_server.http.body import MAX_MEMBERS, MAX_NESTING, MAX_VALUES, _Scan, check_json, decode_members
from tok_server.openai.chat.prompt import MAX_MESSAGES
from tok_server.wire.errors import ApiError

MARKED = st.text(st.sampled_from('\\"[]{},a日'), max_size=12)


def counted(value: Any) -> tuple[int, int, int]:
    """Count the strings and containers, the commas, and the depth of a JSON value."""
    if isinstance(value, dict):
        inner = [counted(one) for pair in value.items() for one in pair]
        commas = max(len(value) - 1, 0)
    elif isinstance(value, list):
        inner = [counted(one) for one in value]
        commas = max(len(value) - 1, 0)
    else:
        return int(isinstance(value, str)), 0, 0
    sums = [sum(column) for column in list(zip(*inner, strict=True))[:2]] or [0, 0]
    return sums[0] + 1, sums[1] + commas, 1 + max((one[2] for one in inner), default=0)


@fuzzed(80)
@given(
    value=st.recursive(VALUES | MARKED, lambda inner: st.lists(inner) | st.dictionaries(MARKED | TEXTS, inner)),
    ascii=st.booleans(),
    piece=st.integers(1, 40),
)
def test_json_scan_counts_members_and_depth_for_any_chunking(value: Any, ascii: bool, piece: int) -> None:
    body = json.dumps(value, ensure_ascii=ascii).encode(errors="replace")
    depths: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_module, "PIECE_BYTES", piece)
        patch.setattr(_Scan, "_check", lambda self, depth: depths.append(depth))
        scan = _Scan()
        scan.run(body)
    assert (scan._strings // 2 + scan._containers, scan._commas, max(depths, default=0)) == counted(value)
    assert scan._depth == scan._in_string == 0


def code(body: bytes) -> str | None:
    """Return the error code of a body that is refused before decoding, or None."""
    try:
        check_json(body)
    except ApiError as error:
        return error.code if error.status == 400 else f"status {error.status}"
    return None


@pytest.mark.parametrize(
    ("one", "count"),
    [
        (b'"k"', MAX_MEMBERS),
        (b"{}", MAX_MEMBERS),
        (b"[1]", MAX_MEMBERS),
        (b'{"a":{}}', MAX_MEMBERS // 3),
        (b"1", MAX_VALUES),
    ],
)
def test_json_body_above_the_member_limit_is_refused(one: bytes, count: int) -> None:
    def body(number: int) -> bytes:
        return b'{"p":[' + b",".join([one] * number) + b"]}"

    assert code(body(count - 3)) is None
    assert code(body(count + 1)) == "too_many_members"


def test_json_body_above_the_nesting_limit_is_refused() -> None:
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        body = opening * MAX_NESTING + b"1" + closing * MAX_NESTING
        assert code(body) is None
        assert code(opening + body + closing) == "nested_too_deeply"
    assert code(b"[" * 1_000_000) == "nested_too_deeply"
    assert code(b'["' + b"[" * 1_000_000 + b'"]') is None


def test_json_limits_ignore_punctuation_within_strings() -> None:
    text = '{"a": [1, "b\\"]}, ' * 100_000
    assert code(json.dumps({"prompt": text}).encode()) is None


@pytest.mark.parametrize(
    ("path", "field", "fields"),
    [
        ("/v1/chat/completions", "messages", {"max_tokens": 1}),
        ("/v1/responses", "input", {"max_output_tokens": 1}),
        ("/tokenize", "messages", {}),
    ],
)
def test_too_many_chat_messages_get_400_naming_the_field(
    server: Server, path: str, field: str, fields: dict[str, object]
) -> None:
    refused = server.call("POST", path, {**fields, field: [{"role": "user", "content": ""}] * (MAX_MESSAGES + 1)})
    assert refused.status == 400
    assert refused.error()["param"] == field
    assert str(MAX_MESSAGES) in str(refused.error()["message"])


def test_member_limit_error_names_the_limit_and_precedes_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    body = b"{" + b",".join(b'"%d":1' % number for number in range(MAX_MEMBERS + 1)) + b"}"
    monkeypatch.setattr("tok_server.http.body.decode", lambda *_: pytest.fail("it was decoded"))
    with pytest.raises(ApiError, match=f"the body has more than {MAX_MEMBERS} strings, objects and arrays"):
        decode_members(body)
