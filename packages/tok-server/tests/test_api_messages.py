"""/v1/messages: Anthropic's requests, answers whole and as events, token counts, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.message_events import added_up, blocks_of, events_of, plain
from support.scripted_model import CHAT_TEMPLATE, make_scripted_model
from support.serving import NAME, Answer, Server, serving
from tok_client.types import known_fields
from tok_server.anthropic.answer_types import TextBlock, ThinkingBlock
from tok_server.anthropic.content import MessageContent
from tok_server.anthropic.endpoint import MESSAGES, parse
from tok_server.anthropic.request_types import CountTokensRequest, MessagesRequest
from tok_server.openai.generation.job import GenerationJob
from tok_server.parsing.pieces import ArgumentsPiece, CallBegin, ContentPiece, Piece, ReasoningPiece
from tok_server.wire import encode
from tok_server.wire.errors import ApiError, unavailable

URL, COUNT_URL = "/v1/messages", "/v1/messages/count_tokens"
# The end of the user's message names the script; its pieces are the tokens that the model writes one by one.
SCRIPTS = {
    "§hello": ["Hel", "lo, ", "world", "."],
    "§calls": ["Let me", " see.\n", "<tool_call>", '\n{"name": "wea', 'ther", "arguments": ', '{"city": ', '"Par',
               'is"}', "}\n</tool_call>"],
    "§think": ["<think>", "\nhm, ", "is it", "\n</think>", "\n\nIt", " is."],
    "§plans": ["<think>so", "</think>\n<tool_call>", '{"name": "weather", ', '"arguments": {"city": "Rome"}}'],
    "§jsons": ['{"answer"', ": 4", "2}"],
    "§empty": [],
}  # fmt: skip
LAST_WORDS = "{{ (messages | selectattr('role', 'equalto', 'user') | list | last).content[-6:] }}"
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}}
SCHEMA = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
END = "<|eot_id|>"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    template = CHAT_TEMPLATE.replace("{{ script }}", LAST_WORDS)
    with serving(make_scripted_model(tmp_path_factory.mktemp("scripted") / "model", SCRIPTS, template)) as running:
        yield running


def user(content: object) -> dict[str, object]:
    return {"role": "user", "content": content}


def result(**fields: object) -> dict[str, object]:
    return {"type": "tool_result", "tool_use_id": "toolu_1", **fields}


def ask(server: Server, text: str = "§hello", **fields: Any) -> Answer:
    return server.call(
        "POST", URL, {"model": NAME, "max_tokens": 40, "messages": [user(text)], "temperature": 0} | fields
    )


def whole(server: Server, text: str = "§hello", **fields: Any) -> dict[str, Any]:
    """Return the message, after a check that its events add up to the same one but for ids and cached tokens."""
    answer = ask(server, text, **fields)
    assert answer.status == 200, answer.body
    found = answer.json()
    assert str(found["id"]).startswith("msg_")
    assert plain(added_up(streamed(server, text, **fields))) == plain(found)
    return found


def streamed(server: Server, text: str = "§hello", **fields: Any) -> list[dict[str, Any]]:
    answer = ask(server, text, stream=True, **fields)
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events_of(answer.body)


def texts(message: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return each block's type and its text or input."""
    members = {"text": "text", "thinking": "thinking", "tool_use": "input"}
    return [(block["type"], block[members[block["type"]]]) for block in message["content"]]


def job_of(server: Server, **fields: Any) -> GenerationJob:
    body = {"max_tokens": 40, "messages": [user("§hello")], **fields}
    return parse(json.dumps(body).encode(), server.engine, (NAME,))[0]


def prompt_of(server: Server, **fields: Any) -> str:
    """Return the rendered prompt of a request."""
    assert server.engine.tokenizer is not None
    return server.engine.tokenizer.decode(job_of(server, **fields).prompts[0], skip_special_tokens=False)


def test_text_is_answered_by_one_text_block(server: Server) -> None:
    message = whole(server, system="be kind", metadata={"user_id": "u"})
    assert texts(message) == [("text", "Hello, world.")]
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", NAME)
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    assert message["usage"]["output_tokens"] == 5
    assert texts(whole(server, "§empty")) == [("text", "")]


def test_tool_calls_and_reasoning_are_blocks_of_their_own(server: Server) -> None:
    message = whole(server, "§calls", tools=[WEATHER])
    assert texts(message) == [("text", "Let me see."), ("tool_use", {"city": "Paris"})]
    assert message["stop_reason"] == "tool_use"
    assert (message["content"][1]["name"], message["content"][1]["id"][:6]) == ("weather", "toolu_")
    message = whole(server, "§think")
    assert texts(message) == [("thinking", "hm, is it"), ("text", "It is.")]
    assert message["usage"]["output_tokens_details"] == {"thinking_tokens": 4}
    assert texts(whole(server, "§plans", tools=[WEATHER])) == [("thinking", "so"), ("tool_use", {"city": "Rome"})]
    none = whole(server, "§calls", tools=[WEATHER], tool_choice={"type": "none"})
    assert texts(none) == [("text", "".join(SCRIPTS["§calls"]))]


def test_stop_reason_names_what_ended_the_answer(server: Server) -> None:
    message = whole(server, max_tokens=2)
    assert (texts(message), message["stop_reason"]) == ([("text", "Hello, ")], "max_tokens")
    message = whole(server, stop_sequences=["x", "world"])
    assert (texts(message), message["stop_reason"]) == ([("text", "Hello, ")], "stop_sequence")
    assert message["stop_sequence"] == "world"
    message = whole(server, "§calls", tools=[WEATHER], stop_sequences=["</tool_call>", "x"])
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)  # the call is complete
    ended_by_id = whole(server, stop_token_ids=job_of(server, messages=[user("world")]).prompts[0][-2:-1])
    assert (ended_by_id["stop_reason"], ended_by_id["stop_sequence"]) == ("end_turn", None)


def test_max_tokens_beyond_the_models_length_ends_with_a_full_context(server: Server) -> None:
    assert whole(server, max_tokens=200_000)["stop_reason"] == "end_turn"
    length = server.engine.info.max_model_len
    long = "a " * (length // 2 - 40)
    message = whole(server, long, max_tokens=length, ignore_eos=True, seed=1)
    assert message["stop_reason"] == "model_context_window_exceeded"
    usage = message["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["output_tokens"] == length


def test_conversation_is_rendered_like_the_chat_of_the_same_messages(server: Server) -> None:
    messages = [
        user([{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "you"}]),
        user("there"),
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "let me see"}, CALL]},
        user([result(content="sunny"), {"type": "text", "text": "thanks"}]),
        {"role": "assistant", "content": [CALL]},
        user([result(content=[{"type": "text", "text": "no such"}, {"type": "text", "text": "city"}], is_error=True)]),
        {"role": "system", "content": "new rules"},
        user([result()]),
        user("bye"),
    ]  # fmt: skip
    text = prompt_of(
        server, messages=messages, system=[{"type": "text", "text": "be"}, {"type": "text", "text": "kind"}]
    )
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    assert text.partition("[system]")[2] == (
        f"be\nkind{END}[user]hi\nyou\nthere{END}[assistant]<think>hm</think>let me see{call}{END}[tool]sunny{END}"
        f"[user]thanks{END}[assistant]{call}{END}[tool]Error: no such\ncity{END}[system]new rules{END}[tool]{END}"
        f"[user]bye{END}[assistant]bye"
    )
    tools = prompt_of(server, tools=[WEATHER, {"type": "custom", "name": "time", "input_schema": {}}])
    function = {"name": "weather", "description": "of a city", "parameters": WEATHER["input_schema"]}
    assert json.dumps({"type": "function", "function": function}) in tools
    assert '"function": {"name": "time", "parameters": {}}' in tools


def test_an_answer_can_be_sent_back(server: Server) -> None:
    first = whole(server, "§plans", tools=[WEATHER])
    call = first["content"][-1]
    back = {"role": first["role"], "content": first["content"]}
    messages = [user("§plans"), back, user([{"type": "tool_result", "tool_use_id": call["id"], "content": "sunny"}])]
    text = prompt_of(server, messages=messages, tools=[WEATHER])
    assert '<think>so</think><tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>' in text
    assert ask(server, messages=messages, tools=[WEATHER]).status == 200


def test_answer_continues_a_last_message_of_the_assistant(server: Server) -> None:
    messages = [user("x"), {"role": "assistant", "content": [{"type": "text", "text": "well §hello"}]}]
    assert prompt_of(server, messages=messages).endswith("[assistant]well \ufffdhello")  # a part of § is not UTF-8
    assert texts(whole(server, messages=messages)) == [("text", "Hello, world.")]


def test_fields_reach_the_job(server: Server) -> None:
    job = job_of(server, temperature=0.5, top_p=0.25, top_k=3, stop_sequences=["a"], min_p=0.1, seed=2, priority=1)
    params = job.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.25, 3, 0.1)
    assert (params.stop, params.seed, params.priority, params.n, params.max_tokens) == (("a",), 2, 1, 1, 40)
    assert job_of(server, cache_salt="salt").cache_salt == "salt"
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        assert job_of(server, tools=[WEATHER], tool_choice=choice).params.grammar is not None
    single = {"type": "auto", "disable_parallel_tool_use": True}
    assert not job_of(server, tools=[WEATHER], tool_choice=single).markup.parallel
    assert job_of(server, tools=[WEATHER]).markup.parallel
    assert job_of(server, tools=[WEATHER]).params.grammar is None
    assert job_of(server, tools=[{**WEATHER, "strict": True}]).params.grammar is not None
    form = {"type": "json_schema", "schema": SCHEMA}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        assert job_of(server, **fields).params.grammar is not None
        assert isinstance(json.loads(texts(whole(server, "§jsons", **fields))[0][1])["answer"], int)


def test_thinking_sets_the_templates_switch(server: Server) -> None:
    off = "<think>\n\n</think>"
    assert off in prompt_of(server, thinking={"type": "disabled"})
    for thinking in ({"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}):
        assert off not in prompt_of(server, thinking=thinking)
    assert job_of(server, thinking={"type": "adaptive"}).ignored == ()
    budget = job_of(server, thinking={"type": "enabled", "budget_tokens": 1024, "display": "omitted"})
    assert budget.ignored == ("thinking.budget_tokens", "thinking.display")
    assert off in prompt_of(server, chat_template_kwargs={"enable_thinking": False})


def test_settings_without_effect_are_listed(tiny_model: Path) -> None:
    with serving(tiny_model) as plain_server:  # its template has no switch, and the model writes no reasoning
        fields: dict[str, Any] = {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}, "betas": []}
        answer = ask(plain_server, max_tokens=1, **fields, tools=[])
        assert answer.status == 200, answer.body
        assert answer.headers["x-tok-ignored"] == "betas,thinking,output_config.effort"
        assert "x-tok-ignored" not in ask(plain_server, max_tokens=1, thinking={"type": "disabled"}).headers
        counted = plain_server.call("POST", COUNT_URL, {"messages": [user("a")], **fields})
        assert counted.headers["x-tok-ignored"] == "betas,thinking,output_config.effort"


def test_count_tokens_equals_the_tokens_of_the_prompt(server: Server) -> None:
    prompt: dict[str, Any] = {
        "system": "be kind",
        "tools": [WEATHER],
        "messages": [user("§hello")],
        "tool_choice": {"type": "auto"},
    }
    counted = server.call("POST", COUNT_URL, {"model": NAME, **prompt})
    usage = whole(server, **prompt)["usage"]
    assert counted.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    many = server.call("POST", COUNT_URL, {"messages": [user("a " * server.engine.info.max_model_len)]})
    assert json.loads(many.body)["input_tokens"] > server.engine.info.max_model_len


BAD: list[tuple[dict[str, Any], str]] = [
    ({"container": "c"}, "container"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ({"inference_geo": "eu"}, "inference_geo"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"thread": {"type": "create"}}, "thread"),
    ({"n": 2}, "n"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"grammar": "root ::= \"a\""}, "grammar"),
    ({"stop": ["a"]}, "stop"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"top_k": -2}, "top_k"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": "a"}, "stop_sequences"),
    ({"min_tokens": 2000}, "min_tokens"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"messages": []}, "messages"),
    ({"messages": [user("")]}, "messages"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
    ({"messages": [user([{"type": "text"}])]}, "messages[0].content[0].text"),
    ({"messages": [user([{"type": "image", "source": {}}])]}, "messages[0].content[0].type"),
    ({"messages": [user([{"type": "document", "source": {}}])]}, "messages[0].content[0].type"),
    ({"messages": [user([CALL])]}, "messages[0].content[0].type"),
    ({"messages": [user([result(content=[{"type": "image"}])])]}, "messages[0].content[0].content[0].type"),
    ({"messages": [user([{"type": "tool_result", "content": "a"}])]}, "messages[0].content[0].tool_use_id"),
    ({"messages": [{"role": "assistant", "content": [{**CALL, "input": None}]}, user("a")]},
     "messages[0].content[0].input"),
    ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}, user("a")]},
     "messages[0].content[0].type"),
    ({"messages": [user("a"), {"role": "assistant", "content": [CALL]}]}, "messages[1].content"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"name": "a", "strict": True, "input_schema": {"type": "object", "properties": {"b": {"type": "x"}}}}]},
     "tools[0].input_schema"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 1}}}}, "output_config.format.schema"),
    ({"output_format": {"type": "json_schema", "schema": SCHEMA},
      "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "output_format"),
    ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "name"), BAD)
def test_refused_field_gets_400_whose_message_begins_with_its_name(
    server: Server, fields: dict[str, Any], name: str
) -> None:
    error = failure(ask(server, **fields), 400, "invalid_request_error")
    assert error.removeprefix("prompt is too long: ").startswith((f"{name} ", f"{name}:")), error


def failure(answer: Answer, status: int, kind: str) -> str:
    """Check the shape of an error; return its message."""
    assert answer.status == status, answer.body
    body = answer.json()
    assert body.keys() == {"type", "error", "request_id"}
    assert (body["type"], body["request_id"]) == ("error", answer.headers["request-id"])
    error = body["error"]
    assert isinstance(error, dict)
    assert error.keys() - {"details"} == {"type", "message"}
    assert error["type"] == kind
    return str(error["message"])


def test_neutral_values_are_accepted(server: Server) -> None:
    neutral: dict[str, Any] = {name: values[-1] for table in MESSAGES for name, values in table.fields.items()}
    answer = ask(server, **neutral, user="u", cache_control={"type": "ephemeral"}, tools=[], nonsense=1)
    assert answer.status == 200, answer.body
    assert answer.headers["x-tok-ignored"] == "service_tier,nonsense"
    assert answer.headers["request-id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize("url", [URL, COUNT_URL])
def test_errors_of_every_kind_have_anthropics_shape(tiny_model: Path, url: str) -> None:
    body = {"messages": [user("a")], "max_tokens": 1}
    with serving(tiny_model, api_key="secret", max_body=1000, rate_limit_requests=2) as limited:
        key = {"x-api-key": "secret", "anthropic-version": "2023-06-01"}
        failure(limited.call("POST", url, body), 401, "authentication_error")
        failure(limited.call("POST", url, body, {**key, "Origin": "http://a.example"}), 403, "permission_error")
        failure(limited.call("GET", url, None, key), 405, "invalid_request_error")
        failure(limited.call("POST", url, {**body, "model": "other"}, key), 404, "not_found_error")
        failure(limited.call("POST", url, b" " * 2000, key), 413, "request_too_large")
        failure(limited.call("POST", url, body, key), 429, "rate_limit_error")
        limited.context.draining = True
        failure(limited.call("POST", url, body, key), 529, "overloaded_error")


def test_context_overflow_says_that_the_prompt_is_too_long(server: Server) -> None:
    for text in ("a " * 1200, "a " * 9000):
        message = failure(ask(server, text), 400, "invalid_request_error")
        assert message.startswith("prompt is too long: messages has ")
        assert message.endswith("This model's maximum context length is 1024 tokens.")


def test_failure_in_a_stream_sends_an_error_event(server: Server) -> None:
    _, serializer = parse(json.dumps({"max_tokens": 1, "messages": [user("a")]}).encode(), server.engine, (NAME,))
    for error, kind in ((unavailable("gone", "x"), "overloaded_error"), (ApiError(500, "gone"), "api_error")):
        (event,) = events_of(serializer.encode_failure(error))
        assert (event["error"]["type"], event["error"]["message"]) == (kind, "gone")


def test_every_field_is_honoured_or_refused() -> None:
    refused = {name for table in MESSAGES for name in table.fields}
    assert not refused & known_fields(MessagesRequest)
    assert known_fields(CountTokensRequest) < known_fields(MessagesRequest)


TEXTS = st.sampled_from(["a", "bc", "é"])
PIECES = st.lists(
    st.one_of(
        st.builds(ContentPiece, TEXTS),
        st.builds(ReasoningPiece, TEXTS),
        st.builds(lambda: [CallBegin("f"), ArgumentsPiece('{"a":'), ArgumentsPiece(" 1}")]),
    ),
    max_size=8,
)


@given(PIECES)
def test_message_events_of_any_pieces_add_up_to_the_blocks(groups: list[Piece | list[Piece]]) -> None:
    pieces = [piece for group in groups for piece in (group if isinstance(group, list) else [group])]
    content = MessageContent()
    events = [event for piece in pieces for event in content.add([piece])] + content.end()
    assert blocks_of(json.loads(encode(events))) == json.loads(encode(content.blocks))
    expected = "".join(piece.text for piece in pieces if isinstance(piece, ContentPiece | ReasoningPiece))
    kept = [block for block in content.blocks if isinstance(block, TextBlock | ThinkingBlock)]
    assert "".join(block.text if isinstance(block, TextBlock) else block.thinking for block in kept) == expected
    assert len(content.blocks) - len(kept) == sum(isinstance(piece, CallBegin) for piece in pieces)
