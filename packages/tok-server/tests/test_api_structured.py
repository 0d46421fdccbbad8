"""Structured outputs over HTTP: every way to ask for them, whole and streamed, and refusals that name the field."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from support.serving import Answer, Server
from tok_client.types import CompletionRequest
from tok_server.openai.generation.params import requested_format
from tok_server.wire.errors import ApiError

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "size": {"enum": [1, 2.5, None]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
RULES = 'root ::= "<" [a-z]{2} ">"\n'
LARK = 'start: "<" /[a-z]{2}/ ">"\n'
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": SCHEMA}}
MESSAGES = [{"role": "user", "content": "hello"}]

ASKED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": FORMAT}, "schema"),
    ({"guided_json": SCHEMA}, "schema"),
    ({"guided_json": json.dumps(SCHEMA)}, "schema"),
    ({"structured_outputs": {"json": SCHEMA}}, "schema"),
    ({"guided_regex": "[ab]{3}c"}, "[ab]{3}c"),
    ({"structured_outputs": {"regex": "[ab]{3}c"}}, "[ab]{3}c"),
    ({"guided_choice": ["yes", "no"]}, "yes|no"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    ({"guided_grammar": RULES}, "<[a-z]{2}>"),
    ({"guided_grammar": LARK}, "<[a-z]{2}>"),
    ({"structured_outputs": {"grammar": LARK}}, "<[a-z]{2}>"),
    ({"structured_outputs": {"grammar": RULES}, "response_format": {"type": "text"}}, "<[a-z]{2}>"),
]


def check(text: str, right: str) -> None:
    if right == "schema":
        jsonschema.validate(json.loads(text), SCHEMA)
    else:
        assert re.fullmatch(right, text)


def choices(answer: Answer) -> list[Any]:
    assert answer.status == 200, answer.body
    found = answer.json()["choices"]
    assert isinstance(found, list)
    return found


def choice(answer: Answer) -> Any:
    (one,) = choices(answer)
    assert one["finish_reason"] == "stop"
    return one


def streamed(answer: Answer) -> list[Any]:
    found: list[Any] = []
    for chunk in answer.chunks():
        parts = chunk["choices"]
        assert isinstance(parts, list)
        found += parts
    return found


@pytest.mark.parametrize(("fields", "right"), ASKED, ids=lambda value: str(value)[:50])
def test_structured_output_matches_its_grammar_whole_and_streamed(
    server: Server, fields: dict[str, Any], right: str
) -> None:
    asked = {"max_tokens": 200, "seed": 3, **fields}
    chatted = choice(server.chat(messages=MESSAGES, **asked))["message"]["content"]
    completed = choice(server.complete(prompt="hello", **asked))["text"]
    check(chatted, right)
    check(completed, right)
    deltas = streamed(server.chat(messages=MESSAGES, stream=True, **asked))
    assert "".join(one["delta"].get("content") or "" for one in deltas) == chatted
    assert "".join(one["text"] for one in streamed(server.complete(prompt="hello", stream=True, **asked))) == completed


@pytest.mark.parametrize("fields", [{"response_format": {"type": "json_object"}}, {"guided_json_object": True}])
def test_json_object_format_gives_a_json_object(server: Server, fields: dict[str, Any]) -> None:
    (one,) = choices(server.chat(messages=MESSAGES, max_tokens=300, seed=1, **fields))
    assert one["message"]["content"].startswith("{")
    if one["finish_reason"] == "stop":
        assert isinstance(json.loads(one["message"]["content"]), dict)


def test_structured_output_holds_for_every_choice_and_prompt(server: Server) -> None:
    found = choices(server.complete(prompt=["a", "b"], n=3, max_tokens=200, guided_json=SCHEMA, logprobs=2))
    assert len(found) == 6
    for one in found:
        check(one["text"], "schema")
        assert all(-50 < value <= 0 for value in one["logprobs"]["token_logprobs"])


def test_neutral_response_format_does_not_change_the_answer(server: Server) -> None:
    plain = server.chat(messages=MESSAGES, max_tokens=8, seed=1).json()["choices"]
    for fields in ({"response_format": {"type": "text"}}, {"response_format": None, "guided_json": None}):
        assert server.chat(messages=MESSAGES, max_tokens=8, seed=1, **fields).json()["choices"] == plain


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "yaml"}}, "response_format.type", "yaml"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
        "missing",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {"items": {}}}}}},
        "response_format.json_schema.schema",
        "'not'",
    ),
    ({"guided_json": {"type": "tree"}}, "guided_json", "type among"),
    ({"guided_json": "{"}, "guided_json", "JSON"),
    ({"guided_regex": "(?=a)"}, "guided_regex", "looks around"),
    ({"guided_choice": []}, "guided_choice", "1 to"),
    ({"guided_grammar": "root ::= x"}, "guided_grammar", "xgrammar"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "not closed"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice", "one of them"),
    ({"response_format": FORMAT, "guided_regex": "a"}, "guided_regex", "one of them"),
    ({"guided_regex": "x" * 300_000}, "guided_regex", "at most"),
    ({"guided_regex": "a", "min_tokens": 2, "max_tokens": 3}, "min_tokens", "grammar"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "grammar"),
]


@pytest.mark.parametrize(("fields", "param", "why"), REFUSED, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("stream", [False, True])
def test_invalid_grammar_or_schema_gets_400_naming_the_field(
    server: Server, fields: dict[str, Any], param: str, why: str, stream: bool
) -> None:
    for answer in (
        server.chat(messages=MESSAGES, stream=stream, **fields),
        server.complete(prompt="hello", stream=stream, **fields),
    ):
        assert answer.status == 400, answer.body
        error = answer.error()
        assert error["param"] == param
        assert why in str(error["message"])


def test_tokens_forced_by_a_grammar_are_counted_in_metrics(server: Server) -> None:
    server.complete(prompt="hello", max_tokens=200, guided_json=SCHEMA)
    text = server.call("GET", "/metrics").body.decode()
    (line,) = [line for line in text.splitlines() if line.startswith("tok_skipped_tokens_total")]
    assert float(line.split()[-1]) > 0


def test_a_too_large_grammar_is_refused_by_its_field() -> None:
    with pytest.raises(ApiError, match=r"guided_grammar has") as refused:
        requested_format(CompletionRequest(prompt="", guided_grammar="x" * 300_000))
    assert refused.value.param == "guided_grammar"
