"""Random requests: each is answered or refused in its API's error shape; none causes a server error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from support.fuzzing import TEXTS, VALUES, changed, fuzzed, torn, written
from support.serving import NAME, Answer, Server, serving

WEATHER = {
    "name": "weather",
    "description": "d",
    "parameters": {"type": "object", "properties": {"c": {"type": "string"}}},
}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
MESSAGES = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": [{"type": "text", "text": "one"}], "name": "n"},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "c", "content": "rain"},
]  # fmt: skip
INPUT = {"name": "weather", "description": "d", "input_schema": WEATHER["parameters"], "strict": True}
CONVERSATION = [
    {"role": "user", "content": [{"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}]},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "so", "signature": ""},
        {"type": "tool_use", "id": "c", "name": "weather", "input": {"c": "x"}}]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "rain"}], "is_error": True}]},
]  # fmt: skip
LIMITED = {"model": NAME, "max_tokens": 2}
VALID: dict[str, list[dict[str, object]]] = {
    "/v1/completions": [
        {**LIMITED, "prompt": ["a", "b"], "n": 2, "best_of": 3, "echo": True, "logprobs": 1, "stop": ["x"], "seed": 1},
        {**LIMITED, "prompt": [[1, 2], [3]], "stream": True, "stream_options": {"include_usage": True}, "top_p": 0.5},
        {**LIMITED, "prompt": "a", "n": 3,
         "stop_when": {"type": "majority", "margin": 1, "pattern": "(.)"}, "top_k": 1},
        {**LIMITED, "prompt": "a", "guided_choice": ["x", "y"], "logit_bias": {"5": 1.5}, "top_k": 3},
    ],
    "/v1/chat/completions": [
        {**LIMITED, "messages": MESSAGES, "tools": [{"type": "function", "function": WEATHER}], "tool_choice": "auto"},
        {**LIMITED, "messages": MESSAGES[:2], "logprobs": True, "top_logprobs": 2, "stream": True, "n": 2},
        {**LIMITED, "messages": MESSAGES[:1], "response_format": {
            "type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}},
        {**LIMITED, "messages": MESSAGES[:1], "structured_outputs": {"regex": "[ab]+"}, "frequency_penalty": 1,
         "chat_template_kwargs": {"deep": 1}, "metadata": {"a": "b"}, "prompt_logprobs": 1},
    ],
    "/v1/responses": [
        {"model": NAME, "input": "a", "max_output_tokens": 2, "instructions": "b", "temperature": 0.5, "stream": True},
        {"model": NAME, "max_output_tokens": 2, "tools": [{"type": "function", **WEATHER}], "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "rain"},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "so"}]},
        ]},
        {"model": NAME, "input": "a", "max_output_tokens": 2, "include": ["message.output_text.logprobs"],
         "text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}, "top_logprobs": 1},
    ],
    "/v1/messages": [
        {**LIMITED, "system": "be kind", "messages": CONVERSATION, "tools": [INPUT], "tool_choice": {"type": "auto"},
         "thinking": {"type": "enabled", "budget_tokens": 1024}, "temperature": 0.5, "top_k": 2},
        {**LIMITED, "messages": CONVERSATION[:1], "stream": True, "stop_sequences": ["x"], "metadata": {"user_id": "u"},
         "tools": [INPUT], "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}},
        {**LIMITED, "messages": CONVERSATION[:1], "system": [{"type": "text", "text": "a"}], "min_p": 0.5,
         "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"}},
    ],
    "/v1/messages/count_tokens": [{"model": NAME, "messages": CONVERSATION, "tools": [INPUT]}],
    "/v1/embeddings": [
        {"model": NAME, "input": ["a", "b"], "encoding_format": "base64", "dimensions": 4},
        {"model": NAME, "input": [[1, 2], [3]], "pooling": "mean"},
    ],
    "/tokenize": [
        {"model": NAME, "prompt": "a b", "add_special_tokens": False, "return_token_strs": True},
        {"model": NAME, "messages": MESSAGES[:2], "add_generation_prompt": True},
    ],
    "/detokenize": [{"model": NAME, "tokens": [1, 2, 3]}],
    "/v1/batches": [
        {"input_file_id": "file-0", "endpoint": "/v1/completions", "completion_window": "24h", "metadata": {"a": "b"},
         "output_expires_after": {"anchor": "created_at", "seconds": 7200}},
    ],
}  # fmt: skip
REFUSED = (400, 404, 413)
MESSAGES_ERRORS = {400: "invalid_request_error", 404: "not_found_error", 413: "request_too_large"}
# The template makes few tokens; its markers make the server parse tool calls and reasoning.
TEMPLATE = (
    "{% if tools %}{{ tools[0].function.name }}<tool_call></tool_call>{% endif %}"
    "{% for message in messages %}{{ message.role[0] }}{{ deep }}{{ message.content }}<eot>{% endfor %}<think></think>"
)


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # Generated requests ask for any n and any length; the limits keep answers short and few.
    data = tmp_path_factory.mktemp("data")
    model = shutil.copytree(tiny_model, tmp_path_factory.mktemp("model") / "tiny")
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    with serving(model, max_n=4, engine_options={"max_model_len": 128}, data_dir=str(data)) as running:
        yield running


def check(answer: Answer, sent: object) -> None:
    """Check that `answer` is a success or a well-formed refusal."""
    assert answer.status == 200 or answer.status in REFUSED, (answer.status, answer.body, sent)
    if answer.status != 200:
        error = messages_error(answer) if answer.json().get("type") == "error" else answer.error()
        assert isinstance(error["message"], str)
        assert error["message"]
        assert error["type"] == "invalid_request_error"
        assert isinstance(error["param"], str | None)
        assert len(answer.body) < 10_000
    elif answer.headers["content-type"].startswith("text/event-stream"):
        check_events(answer, sent)
    else:
        answer.json()


def messages_error(answer: Answer) -> dict[str, object]:
    """Return an error in Anthropic's shape as the error object of other endpoints."""
    found: Any = answer.json()["error"]
    assert found.keys() - {"details"} == {"type", "message"}
    assert found["type"] == MESSAGES_ERRORS[answer.status]
    return {**found, "type": "invalid_request_error", "param": None}


def check_events(answer: Answer, sent: object) -> None:
    blocks = [block.rpartition("data: ")[2] for block in answer.body.decode().split("\n\n")]
    assert blocks.pop() == ""
    for block in blocks:
        if block != "[DONE]":
            found = json.loads(block)
            error = found.get("error")
            assert not error or error["type"] == "invalid_request_error", (error, sent)


@pytest.mark.parametrize("path", VALID)
def test_unmodified_fuzz_bodies_are_answered(server: Server, path: str) -> None:
    for body in VALID[path]:
        assert server.call("POST", path, body).status == (400 if path == "/v1/batches" else 200)


@pytest.mark.parametrize("path", VALID)
@fuzzed(12)
@given(data=st.data())
def test_body_with_changed_values_is_answered_or_refused(server: Server, path: str, data: st.DataObject) -> None:
    body = data.draw(changed(VALID[path]))
    check(server.call("POST", path, written(body)), body)


@fuzzed(30)
@given(path=st.sampled_from(list(VALID)), body=VALUES.map(written) | st.binary(max_size=64))
def test_random_body_is_answered_or_refused(server: Server, path: str, body: bytes) -> None:
    check(server.call("POST", path, body), body)


@fuzzed(40)
@given(path=st.sampled_from(list(VALID)), data=st.data())
def test_a_body_with_bytes_changed_is_answered_or_refused(server: Server, path: str, data: st.DataObject) -> None:
    body = data.draw(torn([written(one) for one in VALID[path]]))
    check(server.call("POST", path, body), body)


STOPS = st.text(st.characters(), max_size=6) | TEXTS | st.sampled_from(["a", " ", "\n" * 4000])


@fuzzed(20)
@given(stop=STOPS | st.lists(STOPS, max_size=6), seed=st.integers(0, 1 << 40), stream=st.booleans())
@example(stop="\ud800", seed=1, stream=False)
@example(stop=["a" * 20_000, "b"], seed=1, stream=True)
def test_text_never_continues_past_a_stop_string(
    server: Server, stop: str | list[str], seed: int, stream: bool
) -> None:
    stops = [stop] if isinstance(stop, str) else stop
    # U+FFFD stands for bytes that are no character, and stop strings are matched against the bytes.
    assume(not any("\ufffd" in one for one in stops))
    fields = {"prompt": "one", "max_tokens": 12, "temperature": 2, "seed": seed, "ignore_eos": True}
    answer = server.complete(**fields, stop=stop, stream=stream)
    check(answer, stop)
    if answer.status == 200:
        text, reason = told(answer, stream)
        free, _ = told(server.complete(**fields), False)
        assert free.startswith(text)
        assert not any(one in text for one in stops), (text, stop)
        assert reason == ("stop" if any(one in free for one in stops) else "length")


def told(answer: Answer, stream: bool) -> tuple[str, str]:
    """Return the text and the finish reason of the only choice."""
    chunks: list[Any] = list(answer.chunks()) if stream else [answer.json()]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]
