"""Answers that are written in pieces equal answers that are written at once."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import msgspec
import pytest

from support.patience import PATIENCE
from support.serving import Server
from tok_core import Completion, RequestOutput, TokenLogprob
from tok_core.outputs import Timings
from tok_server.batch.storage.output_lines import line_answer
from tok_server.openai import embeddings
from tok_server.openai.chat import endpoint as chat
from tok_server.openai.completions import endpoint as completions
from tok_server.openai.completions.serializer import CompletionSerializer
from tok_server.openai.generation import answers as answer
from tok_server.openai.generation.job import MAX_LOGPROBS
from tok_server.openai.generation.serializer import AnswerSerializer
from tok_server.wire import json_pieces
from tok_server.wire.json_pieces import encode_elements, fill_lists, join_with_commas, next_piece, pop_slices, slices

ASKED: Sequence[tuple[str, dict[str, object]]] = [
    ("completions", {}),
    ("completions", {"n": 3, "return_token_ids": True, "seed": 1}),
    ("completions", {"n": 2, "logprobs": 3}),
    ("completions", {"n": 2, "logprobs": 0, "echo": True}),
    ("completions", {"logprobs": 2, "echo": True, "max_tokens": 0}),
    ("completions", {"n": 2, "prompt_logprobs": 2, "echo": True}),
    ("completions", {"n": 2, "best_of": 4, "prompt": ["one two", '"choices":[] "tokens":[]']}),
    ("completions", {"n": 2, "best_of": 4, "logprobs": 1, "prompt": ["one", "two"]}),
    ("chat/completions", {"n": 2}),
    ("chat/completions", {"n": 2, "logprobs": True, "top_logprobs": 4, "return_token_ids": True}),
    ("chat/completions", {"logprobs": True, "prompt_logprobs": 1}),
    ("chat/completions", {"stop_when": {"type": "distinct", "count": 2, "pattern": "(.)"}, "n": 4}),
    ("embeddings", {}),
    ("embeddings", {"input": ["one"] * 40, "encoding_format": "base64"}),
]


@pytest.mark.parametrize(("path", "fields"), ASKED)
def test_answer_in_pieces_equals_the_whole_answer(
    server: Server, path: str, fields: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = 'one "choices":[] {"tokens":[]}'
    asked: dict[str, object] = {"model": "tiny", "temperature": 0, "max_tokens": 20, "ignore_eos": True}
    if path == "completions":
        asked["prompt"] = text
    elif path == "embeddings":
        asked = {"model": "tiny", "input": [text, "two"]}
    else:
        asked["messages"] = [{"role": "user", "content": text}]
    asked |= fields
    whole = server.call("POST", f"/v1/{path}", asked)
    assert whole.status == 200, whole.body
    assert "content-length" in whole.headers
    for name, size in (
        ("MIN_PIECEWISE_BYTES", 0),
        ("MIN_PIECEWISE_COMPONENTS", 0),
        ("MIN_PIECE_BYTES", 100),
        ("ENTRIES_PER_SLICE", 7),
    ):
        for module in (answer, json_pieces, embeddings):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, size)
    pieces = server.call("POST", f"/v1/{path}", asked)
    assert pieces.headers["transfer-encoding"] == "chunked"
    assert pieces.headers["content-type"] == whole.headers["content-type"]
    assert said(pieces.json()) == said(whole.json())
    assert list(pieces.json()) == list(whole.json())


def said(found: dict[str, object]) -> dict[str, object]:
    """Return an answer without id, time and cached tokens, which differ between equal requests."""
    found = {name: value for name, value in found.items() if name not in ("id", "created")}
    if isinstance(found.get("usage"), dict):
        found["usage"] = {**found["usage"], "prompt_tokens_details": None}  # type: ignore[dict-item]
    return found


def test_json_pieces_helpers_split_and_join_lists() -> None:
    assert list(pop_slices([1, 2, 3, 4, 5], 2)) == [[1, 2], [3, 4], [5]]
    assert list(slices([1, 2, 3], 2)) == [[1, 2], [3]]
    assert b"".join(encode_elements([[1], [], [2, 3]])) == b"1,2,3"
    assert b"".join(join_with_commas([[b"a", b"b"], [b"c"]])) == b"ab,c"
    assert b"".join(fill_lists(b'{"a":[],"b":[]}', [("a", [b"1"]), ("b", [])])) == b'{"a":[1],"b":[]}'
    assert next_piece(iter([])) == b""


def output(tokens: int, n: int, top: int) -> RequestOutput:
    """Return a finished request with log-probabilities."""
    likely = tuple((token, -0.5 * token) for token in range(top))
    samples = [
        Completion(index, [5] * tokens, "a" * tokens, [TokenLogprob(5, -0.25, likely) for _ in range(tokens)], "length")
        for index in range(n)
    ]
    return RequestOutput("r", [1, 2], samples, 0, Timings(0.0))


@pytest.mark.parametrize("path", ["completions", "chat"])
def test_pieces_are_under_1_mib_and_free_written_logprobs(server: Server, path: str) -> None:
    if path == "chat":
        body = {"messages": [{"role": "user", "content": "a"}], "n": 2, "logprobs": True, "top_logprobs": 5}
        serializer: AnswerSerializer = chat.parse(json.dumps(body).encode(), server.engine, ("tiny",))[1]
    else:
        body = {"prompt": "a", "n": 2, "logprobs": 5, "max_tokens": 50}
        serializer = completions.parse(json.dumps(body).encode(), server.engine, ("tiny",))[1]
    outputs = [output(20_000, 2, 5)]
    expected = msgspec.json.decode(serializer.encode_answer(outputs))
    pieces, found, longest = serializer.encode_pieces(outputs), [], 0
    while piece := next_piece(pieces):
        found.append(piece)
        longest = max(longest, len(piece))
    assert msgspec.json.decode(b"".join(found)) == expected
    assert longest < 1 << 20 < sum(map(len, found))
    assert not any(one.logprobs for one in outputs[0].outputs)


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        ("completions", {"prompt": "a", "n": 16_384, "max_tokens": 1000, "logprobs": 1}, "logprobs"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 4096, "logprobs": True,
                              "top_logprobs": 20}, "top_logprobs"),
    ],
)  # fmt: skip
def test_too_many_logprobs_get_400_naming_the_field(
    server: Server, path: str, fields: dict[str, object], name: str
) -> None:
    refused = server.call("POST", f"/v1/{path}", fields)
    assert refused.status == 400
    assert refused.error()["param"] == name
    assert str(MAX_LOGPROBS) in str(refused.error()["message"])


def test_exception_in_a_piecewise_answer_closes_the_connection(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: CompletionSerializer, outputs: object) -> object:
        yield b'{"id":'
        raise RuntimeError("a defect")

    monkeypatch.setattr(answer, "MIN_PIECEWISE_BYTES", 0)
    monkeypatch.setattr(CompletionSerializer, "encode_pieces", broken)
    with pytest.raises(Exception, match=r"Incomplete|reset|closed|aborted"):
        server.complete(prompt="one", max_tokens=1)
    deadline = time.monotonic() + PATIENCE
    while server.context.open_requests and time.monotonic() < deadline:
        time.sleep(0.01)
    monkeypatch.undo()
    assert server.complete(prompt="one", max_tokens=1).status == 200


def test_answer_of_finds_the_usage_of_a_long_answer() -> None:
    used = '"usage":{"prompt_tokens":3,"completion_tokens":5,"total_tokens":8}'
    filler = '"x":"' + "a" * (2 << 20) + '"'
    for body in (
        f'{{{filler},{used},"system_fingerprint":"f"}}',
        f'{{{used},{filler},"tools":[{{"parameters":{{"usage":{{"prompt_tokens":9}}}}}}]}}',
        f"{{{used},{filler}}}",
    ):
        found = line_answer(7, 200, body.encode(), b"")
        assert (found.line, found.input_tokens, found.output_tokens) == (7, 3, 5)
