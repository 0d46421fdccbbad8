"""Bad input gets an error that names the field, and the next request is served normally."""

from __future__ import annotations

import gzip
import json
import socket

import pytest

from support.patience import PATIENCE
from support.serving import Answer, Server

USER = [{"role": "user", "content": "hi"}]
HUGE = 10**30

COMPLETIONS: list[tuple[dict[str, object], str]] = [
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": HUGE}, "n"),
    ({"n": 1.5}, "n"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": {"text": "a"}}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [512]}, "prompt"),
    ({"prompt": [HUGE]}, "prompt"),
    ({"prompt": [[1], [512]]}, "prompt[1]"),
    ({"prompt": [1] * 1024}, "prompt"),
    ({"prompt": "word " * 2000}, "prompt"),
    ({"prompt": ["a"] * 100, "n": 16_000}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": 5000}, "max_tokens"),
    ({"max_tokens": "7"}, "max_tokens"),
    ({"max_tokens": HUGE}, "max_tokens"),
    ({"min_tokens": 17}, "min_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 1e3}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": HUGE}, "seed"),
    ({"seed": 0.5}, "seed"),
    ({"logit_bias": {"512": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"the": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias"),
    ({"logit_bias": {"5": None}}, "logit_bias"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": ["a", 1]}, "stop[1]"),
    ({"stop_token_ids": [512]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"suffix": "end"}, "suffix"),
    ({"messages": USER}, "messages"),
    ({"max_completion_tokens": 3}, "max_completion_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
]

CHAT: list[tuple[dict[str, object], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [*USER, {"role": "robot", "content": "x"}]}, "messages[1].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
    (
        {
            "messages": [
                *USER,
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            ]
        },
        "messages[1].content[0].type",
    ),
    ({"messages": [{"role": "function", "content": "4", "name": "f"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "4"}]}, "messages[0].tool_call_id"),
    ({"messages": [*USER, {"role": "assistant", "refusal": "no"}]}, "messages[1].refusal"),
    ({"messages": [{"role": "user", "content": "word " * 2000}]}, "messages"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    ({"max_completion_tokens": 5000}, "max_completion_tokens"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"n": 0}, "n"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tools": "nonsense"}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "x", "format": "wav"}}, "audio"),
    ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"store": 0}, "store"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"prompt": "one"}, "prompt"),
    ({"best_of": 2}, "best_of"),
    ({"echo": True}, "echo"),
    ({"suffix": "end"}, "suffix"),
]


def check_refused(answer: Answer, param: str | None, status: int = 400) -> None:
    error = answer.error()
    assert answer.status == status, error
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    assert isinstance(error["message"], str)
    assert error["message"]
    if param is not None:
        assert param.partition("[")[0].partition(".")[0] in error["message"]


def check_serves(server: Server) -> None:
    answer = server.complete(prompt="one", max_tokens=2, temperature=0, ignore_eos=True)
    assert answer.status == 200, answer.body
    assert answer.json()["usage"]["completion_tokens"] == 2  # type: ignore[index]


@pytest.mark.parametrize(("fields", "param"), COMPLETIONS, ids=lambda value: str(value)[:60])
def test_completion_with_a_bad_field_gets_400_naming_the_field(
    server: Server, fields: dict[str, object], param: str
) -> None:
    check_refused(server.complete(**{"prompt": "one", **fields}), param)
    check_serves(server)


@pytest.mark.parametrize(("fields", "param"), CHAT, ids=lambda value: str(value)[:60])
def test_chat_with_a_bad_field_gets_400_naming_the_field(server: Server, fields: dict[str, object], param: str) -> None:
    check_refused(server.chat(**{"messages": USER, "max_completion_tokens": None, **fields}), param)
    check_serves(server)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": "abc"}, "max_tokens is a string; allowed: integers, null"),
        ({"stream": 1}, "stream is an integer; allowed: true, false, null"),
        ({"stop": ["a", 1]}, "stop[1] is an integer; allowed: strings"),
        ({"messages": {}}, "messages is an object; allowed: arrays"),
        ({"messages": [{"content": "a"}]}, "messages[0].role is required, but missing"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content is null; allowed: strings, arrays"),
        ({"tools": [{"type": "x"}]}, "tools[0].type is 'x'; allowed: 'function', 'custom'"),
        ({"tool_choice": "x"}, "tool_choice is 'x'; allowed: 'auto', 'none', 'required', objects, null"),
        ({"verbosity": "loud"}, "verbosity is 'loud'; allowed: 'high', 'low', 'medium', null"),
        ({"stop_when": {"type": "a"}}, "stop_when.type is 'a'; allowed: 'distinct', 'majority', 'first_match'"),
        ({"logit_bias": {"5": "a"}}, "logit_bias holds a string; allowed: numbers"),
        ({"allowed_token_ids": []}, "allowed_token_ids has 0 ids; allowed: at least one"),
    ],
)  # fmt: skip
def test_value_of_another_type_is_named_with_what_is_allowed(
    server: Server, fields: dict[str, object], message: str
) -> None:
    assert server.chat(**{"messages": USER, **fields}).error()["message"] == message


def test_unknown_url_gets_404_that_says_how_urls_begin(server: Server) -> None:
    for path in ("/chat/completions", "/v1/chats"):
        answer = server.call("POST", path, {"messages": USER})
        assert answer.status == 404
        assert "/v1/" in str(answer.error()["message"])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", "empty"),
        (b"{", "JSON"),
        (b'{"model": "tiny",}', "JSON"),
        (b"[]", "object"),
        (b"null", "object"),
        (b'{"temperature": NaN}', "JSON"),
        (b'{"prompt": "\xff\xfe"}', "UTF-8"),
        (b'{"prompt": "\\ud800"}', ""),
        (b'{"prompt": ' + b"[" * 100_000, ""),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(server: Server, path: str, body: bytes, told: str) -> None:
    answer = server.call("POST", path, body)
    error = answer.error()
    assert answer.status == 400
    assert error["type"] == "invalid_request_error"
    assert told in str(error["message"])
    check_serves(server)


@pytest.mark.parametrize(("path", "param"), [("completions", "prompt"), ("chat/completions", "messages")])
def test_missing_required_field_gets_400_naming_the_field(server: Server, path: str, param: str) -> None:
    check_refused(server.call("POST", f"/v1/{path}", {"model": "tiny"}), param)


def test_empty_prompt_is_served_only_if_the_tokenizer_adds_a_bos_token(server: Server) -> None:
    tokenizer = server.engine.tokenizer
    assert tokenizer is not None
    answer = server.complete(prompt="", max_tokens=1)
    if tokenizer.encode(""):
        assert answer.status == 200
    else:
        check_refused(answer, "prompt")
    check_serves(server)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_content_type_other_than_json_is_refused(server: Server, kind: str) -> None:
    body = json.dumps({"prompt": "one"}).encode()
    check_refused(server.call("POST", "/v1/completions", body, {"Content-Type": kind}), "Content-Type")


def test_body_that_is_too_large_gets_413(server: Server) -> None:
    answer = server.complete(prompt="a" * (1 << 21))
    assert answer.status == 413
    assert answer.error()["code"] == "request_too_large"
    check_serves(server)


def test_gzip_body_is_limited_by_its_decompressed_size(server: Server) -> None:
    packed = {"Content-Encoding": "gzip"}
    small = gzip.compress(b'{"prompt": "one", "max_tokens": 1}')
    assert server.call("POST", "/v1/completions", small, packed).status == 200
    bomb = gzip.compress(b'{"prompt": "' + b"a" * (1 << 24) + b'"}')
    assert len(bomb) < 1 << 20
    assert server.call("POST", "/v1/completions", bomb, packed).status == 413
    check_serves(server)


def test_client_disconnect_in_mid_body_does_not_affect_other_requests(server: Server) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n"
    head += b"Content-Type: application/json\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
        connection.sendall(head + b'{"prompt": "one"')
    check_serves(server)


def test_unknown_model_name_gets_404(server: Server) -> None:
    for path, field in (
        ("completions", {"prompt": "one"}),
        ("chat/completions", {"messages": USER}),
    ):
        answer = server.call("POST", f"/v1/{path}", {"model": "gpt-x", **field})
        check_refused(answer, "model", 404)
        assert answer.error()["code"] == "model_not_found"


def test_a_request_without_a_model_is_served(server: Server) -> None:
    assert server.call("POST", "/v1/completions", {"prompt": "one", "max_tokens": 1}).status == 200


def test_unknown_url_gets_404_and_wrong_method_405_in_openai_error_shape(server: Server) -> None:
    check_refused(server.call("GET", "/v1/nothing"), None, 404)
    answer = server.call("GET", "/v1/completions")
    check_refused(answer, None, 405)
    assert answer.headers["allow"] == "POST"
    check_refused(server.call("POST", "/health", {}), None, 405)


def test_unsupported_fields_with_neutral_values_are_accepted(server: Server) -> None:
    answer = server.chat(
        messages=USER, max_tokens=1, tools=None, functions=[], tool_choice="none", response_format={"type": "text"},
        modalities=["text"], audio=None, prediction=None, store=False, service_tier="auto", user="u",
        metadata={"a": "b"}, safety_identifier="s", prompt_cache_key="k", stream_options=None, logprobs=False,
        stop=None, n=None, temperature=None, parallel_tool_calls=True, reasoning_effort=None,
    )  # fmt: skip
    assert answer.status == 200, answer.body
    assert "x-tok-ignored" not in answer.headers
    answer = server.complete(
        prompt="one", max_tokens=1, echo=False, suffix=None, best_of=1, n=1, messages=None, tools=[]
    )
    assert answer.status == 200, answer.body
    assert "x-tok-ignored" not in answer.headers


def test_unknown_fields_are_ignored_and_listed_in_x_tok_ignored(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    strange = {"unheard_of": 1, "a\r\nb": {"c": []}}
    for stream in (False, True, False):
        answer = server.complete(prompt="one", max_tokens=1, stream=stream, **strange)
        assert answer.status == 200
        assert answer.headers["x-tok-ignored"] == "a%0D%0Ab,unheard_of"
    told = [record.getMessage() for record in caplog.records if "ignored request fields" in record.getMessage()]
    assert len(told) == 1
    assert "'unheard_of'" in told[0]


def test_nested_unknown_fields_are_listed_with_their_path(server: Server) -> None:
    parts = [{"type": "text", "text": "hi", "a b": 1}, {"type": "text", "text": "ho"}]
    messages = [{"role": "user", "content": "hi", "foo": 1}, {"role": "user", "name": "n", "content": parts}]
    options = {"include_usage": True, "zzz": 2}
    answer = server.chat(messages=messages, max_tokens=1, stream=True, stream_options=options, zeta=0)
    assert answer.status == 200, answer.body
    listed = answer.headers["x-tok-ignored"].split(",")
    assert listed == ["zeta", "messages[0].foo", "messages[1].content[0].a%20b", "stream_options.zzz"]


def test_the_list_of_unknown_fields_is_bounded(server: Server) -> None:
    message = {"role": "user", "content": "hi", **{f"field{number}": 1 for number in range(100)}}
    answer = server.chat(messages=[message], max_tokens=1)
    assert answer.status == 200, answer.body
    assert len(answer.headers["x-tok-ignored"].split(",")) == 32


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop_token_ids": [1] * 65}, "stop_token_ids has 65 ids; allowed: at most 64"),
        ({"stop": ["a"] * 17}, "stop has 17 strings; allowed: at most 16"),
    ],
)
def test_value_with_too_many_parts_is_reported_by_its_size(
    server: Server, fields: dict[str, object], message: str
) -> None:
    answer = server.call("POST", "/v1/completions", {"prompt": "a", **fields})
    assert answer.status == 400
    assert answer.error()["message"] == message
