"""Tool calls and reasoning over HTTP, equal whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import PreTrainedTokenizerFast

from support.scripted_model import make_scripted_model
from support.serving import NAME, Server, serving

# Each script lists the tokens that the model writes one by one.
SCRIPTS = {
    "@call": [
        *("Let me", " see.\n", "<tool_call>", '\n{"name": "wea', 'ther", "arguments": '),
        *('{"city": ', '"Par', 'is"}', "}\n</tool_call>"),
    ],
    "@two": [
        *("\n<tool_call>", '{"name": "time"', "}</tool", "_call>\n<tool_call>"),
        *('{"arguments": {}, "na', 'me": "time"}'),
    ],
    "@broken": [
        'a <tool_call>{"name": "time", "arguments": {"a": ',
        "True}}</tool_call>",
        '\n<tool_call>{"name": "time"}',
    ],
    "@bad": ['<tool_call>{"name": "nobody"}', " </tool_call> so"],
    "@think": ["<think>", "\nhm, ", "is it", "\n</think>", "\n\nIt", " is."],
    "@plan": ["<think>so", "</think>\n<tool_call>", '{"name": "weather", ', '"arguments": {"city": "Rome"}}'],
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "time"}},
]
USER: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(make_scripted_model(tmp_path_factory.mktemp("scripted") / "model", SCRIPTS)) as running:
        yield running


def say(server: Server, script: str, **fields: Any) -> dict[str, Any]:
    """Return the only choice of the answer to `script`, after a check that streaming gives the same choice."""
    asked = {"messages": USER, "chat_template_kwargs": {"script": script}, **fields}
    answer = server.chat(**asked)
    assert answer.status == 200, answer.body
    choices: Any = answer.json()["choices"]
    assert len(choices) == 1
    choice: dict[str, Any] = choices[0]
    assert without_ids(streamed(server, asked)) == without_ids(choice)
    return choice


def streamed(server: Server, asked: dict[str, Any]) -> dict[str, Any]:
    """Return the choice that the chunks of a stream add up to."""
    message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
    reason = None
    chunks: Any = server.chat(**asked, stream=True).chunks()
    for chunk in chunks:
        (part,) = chunk["choices"]
        for name in ("content", "reasoning_content"):
            if gained := part["delta"].get(name):
                message[name] = (message.get(name) or "") + gained
        for gained in part["delta"].get("tool_calls", ()):
            take(message.setdefault("tool_calls", []), gained)
        reason = part["finish_reason"] or reason
    return {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}


def take(calls: list[dict[str, Any]], gained: dict[str, Any]) -> None:
    if gained["index"] == len(calls):
        assert gained["function"]["arguments"] == ""  # the name comes first
        calls.append({"type": gained["type"], "id": gained["id"], "function": dict(gained["function"])})
    else:
        assert gained.keys() == {"index", "function"}
        calls[gained["index"]]["function"]["arguments"] += gained["function"]["arguments"]


def without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    calls = choice["message"].get("tool_calls", [])
    assert len({call["id"] for call in calls}) == len(calls)
    bare = [{**call, "id": ""} for call in calls]
    return {**choice, "message": {**choice["message"], "tool_calls": bare}}


def called(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = choice["message"].get("tool_calls", [])
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def test_tool_call_comes_with_the_content_before_the_call(server: Server) -> None:
    choice = say(server, "@call", tools=TOOLS)
    assert choice["message"]["content"] == "Let me see."
    assert called(choice) == [("weather", {"city": "Paris"})]
    assert choice["finish_reason"] == "tool_calls"


def test_tool_call_is_streamed_once_complete(server: Server) -> None:
    chunks = server.chat(
        messages=USER, tools=TOOLS, chat_template_kwargs={"script": "@call"}, stream=True, return_token_ids=True
    ).chunks()
    deltas = [chunk["choices"][0]["delta"].get("tool_calls") for chunk in chunks]  # type: ignore[index]
    gained = [delta[0]["function"].get("arguments") for delta in deltas if delta]
    assert gained == ["", '{"city": "Paris"}']
    ids = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", ())]  # type: ignore[index]
    assert len(ids) == len(SCRIPTS["@call"]) + 1  # ids of tokens without text of their own are included


def test_parallel_tool_calls_false_keeps_only_the_first_call(server: Server) -> None:
    assert called(say(server, "@two", tools=TOOLS)) == [("time", {}), ("time", {})]
    assert called(say(server, "@two", tools=TOOLS, parallel_tool_calls=False)) == [("time", {})]


def test_no_call_is_parsed_without_tools_or_with_tool_choice_none(server: Server) -> None:
    text = "".join(SCRIPTS["@call"])
    silent: list[dict[str, Any]] = [{}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}]
    for fields in silent:
        choice = say(server, "@call", **fields)
        assert choice["message"]["content"] == text
        assert choice["finish_reason"] == "stop"


def test_call_of_an_unknown_tool_is_content(server: Server) -> None:
    choice = say(server, "@bad", tools=TOOLS)
    assert choice["message"]["content"] == "".join(SCRIPTS["@bad"])
    assert choice["finish_reason"] == "stop"


def test_tool_call_cut_off_by_max_tokens_is_content(server: Server) -> None:
    choice = say(server, "@call", tools=TOOLS, max_tokens=7)
    assert "tool_calls" not in choice["message"]
    assert choice["message"]["content"] == "".join(SCRIPTS["@call"][:7])
    assert choice["finish_reason"] == "length"


def test_call_with_broken_json_is_content_and_the_next_call_is_parsed(server: Server) -> None:
    choice = say(server, "@broken", tools=TOOLS)
    assert choice["message"]["content"] == "".join(SCRIPTS["@broken"][:2])
    assert called(choice) == [("time", {})]
    assert choice["finish_reason"] == "tool_calls"


CHOOSY: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "maximum": 9}},
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    },
    TOOLS[1],
]
ONE_CALL: Any = {"parallel_tool_calls": False, "reasoning_effort": "none", "temperature": 1}


@pytest.mark.parametrize("seed", range(3))
def test_required_and_named_tool_choice_force_a_valid_call(server: Server, seed: int) -> None:
    # "@bad" begins a call of an unknown tool, which the grammar turns into a call of a known tool.
    choice = say(server, "@bad", tools=CHOOSY, tool_choice="required", seed=seed, **ONE_CALL)
    ((name, arguments),) = called(choice)
    assert name in ("weather", "time")
    check_choosy(arguments) if name == "weather" else None
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    named = {"type": "function", "function": {"name": "weather"}}
    ((name, arguments),) = called(say(server, "@two", tools=CHOOSY, tool_choice=named, seed=seed, **ONE_CALL))
    assert name == "weather"
    check_choosy(arguments)


def check_choosy(arguments: Any) -> None:
    assert arguments.keys() == {"city", "days"}
    assert arguments["city"] in ("Paris", "Rome")
    assert arguments["days"] <= 9


@pytest.mark.parametrize("seed", range(2))
def test_strict_tool_schema_binds_with_tool_choice_auto(server: Server, seed: int) -> None:
    # The script calls with a city alone; the schema requires days, too.
    ((name, arguments),) = called(say(server, "@call", tools=CHOOSY[:1], seed=seed, **ONE_CALL))
    assert name == "weather"
    check_choosy(arguments)
    assert arguments["city"] == "Paris"


def test_response_format_applies_after_reasoning(server: Server) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["It is."]}}}
    choice = say(server, "@think", response_format=schema)
    assert choice["message"]["reasoning_content"] == "hm, is it"
    assert choice["message"]["content"] == '"It is."'


def test_reasoning_content_is_separate_and_its_tokens_are_counted(server: Server) -> None:
    choice = say(server, "@think")
    assert choice["message"]["reasoning_content"] == "hm, is it"
    assert choice["message"]["content"] == "It is."
    for stream in (False, True):
        fields: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        answer = server.chat(messages=USER, n=3, chat_template_kwargs={"script": "@think"}, **fields)
        used: Any = (answer.chunks()[-1] if stream else answer.json())["usage"]
        assert used["completion_tokens_details"] == {"reasoning_tokens": 3 * 4}
        assert used["completion_tokens"] == 3 * 7


def test_tool_call_may_follow_reasoning(server: Server) -> None:
    choice = say(server, "@plan", tools=TOOLS)
    assert choice["message"]["reasoning_content"] == "so"
    assert choice["message"]["content"] is None
    assert called(choice) == [("weather", {"city": "Rome"})]


def test_reasoning_cut_off_by_max_tokens_is_not_content(server: Server) -> None:
    choice = say(server, "@think", max_tokens=3)
    assert choice["message"]["reasoning_content"] == "hm, is it"
    assert choice["message"]["content"] is None


def text_of(server: Server, **fields: object) -> str:
    """Return the rendered prompt of a chat."""
    answer = server.call("POST", "/tokenize", {"messages": USER, **fields})
    assert answer.status == 200, answer.body
    again = server.call("POST", "/detokenize", {"tokens": answer.json()["tokens"]})
    return str(again.json()["prompt"])


def test_tools_and_their_results_reach_the_template(server: Server) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "sunny"}]},
    ]
    text = text_of(server, messages=messages, tools=TOOLS)
    assert json.dumps(TOOLS[0]) in text
    assert '<think>hm</think><tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>' in text
    assert text.endswith("[tool]sunny<|eot_id|>[assistant]")
    call["function"]["arguments"] = "no json"  # type: ignore[index]
    assert '"arguments": "no json"' in text_of(server, messages=messages)


# As DeepSeek's: calls are in messages whose content is null, and their arguments are text.
NULL_TESTING_TEMPLATE = """{% for message in messages %}[{{ message.role }}]
{%- if message.content is none %}
{%- for call in message.tool_calls %}<call>{{ call['type'] + call['function']['name'] + call['function']['arguments'] }}
{%- endfor %}
{%- else %}{{ message['content'] }}
{%- endif %}<|eot_id|>{% endfor %}"""


@pytest.mark.parametrize("content", [None, ""])
def test_calls_reach_a_template_that_expects_null_content_and_text(tmp_path: Path, content: str | None) -> None:
    function = {"name": "weather", "arguments": '{"city":  "Köln"}'}
    calling = {"role": "assistant", "content": content, "tool_calls": [{"type": "function", "function": function}]}
    calling["tool_calls"][0]["id"] = "c1"  # type: ignore[index]
    messages = [*USER, calling, {"role": "tool", "tool_call_id": "c1", "content": "sunny"}]
    with serving(make_scripted_model(tmp_path / "model", SCRIPTS, NULL_TESTING_TEMPLATE)) as server:
        text = text_of(server, messages=messages)
    assert text == (
        '[user]hi<|eot_id|>[assistant]<call>functionweather{"city":  "Köln"}<|eot_id|>[tool]sunny<|eot_id|>'
    )


def test_enable_thinking_and_reasoning_effort_reach_the_template(server: Server) -> None:
    assert "<think>" not in text_of(server)
    assert text_of(server, chat_template_kwargs={"enable_thinking": False}).endswith("<think>\n\n</think>\n\n")
    body = {"messages": USER, "reasoning_effort": "none", "max_tokens": 1, "prompt_logprobs": 0}
    shown: Any = server.chat(**body).json()["prompt_logprobs"]
    assert "".join(next(iter(one.values()))["decoded_token"] for one in shown[-12:] if one).endswith("</think>\n\n")


def test_continue_final_message_continues_the_last_message(server: Server) -> None:
    messages = [*USER, {"role": "assistant", "content": "It has @think"}]
    text = text_of(server, messages=messages, continue_final_message=True)
    assert text.endswith("[assistant]It has @think")
    assert text_of(server, messages=messages, add_generation_prompt=False).endswith("It has @think<|eot_id|>")
    answer = server.chat(messages=messages, continue_final_message=True).json()
    assert answer["choices"][0]["message"]["content"] == "It is."  # type: ignore[index]


TRIMMING_TEMPLATE = """{% for message in messages %}[{{ message.role }}]
{{ "(reasoned) " if message.reasoning_content is string }}
{{- message.content | trim if trims else message.content }}<|eot_id|>{% endfor %}"""


def test_a_message_continues_as_in_transformers(tmp_path: Path) -> None:
    model = make_scripted_model(tmp_path / "model", SCRIPTS, TRIMMING_TEMPLATE)
    library = PreTrainedTokenizerFast.from_pretrained(str(model))
    with serving(model) as server:
        for content in ("A: ", "A:", " A\n", "A \n"):
            messages = [*USER, {"role": "assistant", "content": content, "reasoning_content": ""}]
            for trims in (True, False):
                expected = library.apply_chat_template(
                    messages, tokenize=False, continue_final_message=True, trims=trims
                )
                fields = {"continue_final_message": True, "chat_template_kwargs": {"trims": trims}}
                assert text_of(server, messages=messages, **fields) == expected
        blank = [*USER, {"role": "assistant", "content": " "}]
        fields = {"continue_final_message": True, "chat_template_kwargs": {"trims": True}}
        assert text_of(server, messages=blank, **fields).endswith("[assistant]\n")


def test_only_the_continued_message_decides_if_reasoning_is_open(server: Server) -> None:
    asked: Any = [{"role": "user", "content": "What is <think>?"}]
    for begun, thinking in (("A tag", False), ("<think>hm", True), ("<think>hm</think> A tag", False)):
        messages = [*asked, {"role": "assistant", "content": f"{begun} @bad"}]
        answer: Any = server.chat(messages=messages, continue_final_message=True).json()
        message = answer["choices"][0]["message"]
        assert bool(message.get("reasoning_content")) is thinking
        assert bool(message["content"]) is not thinking


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"chat_template_kwargs": {"no_such": 1}}, "chat_template_kwargs.no_such"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs.bos_token"),
    ({"continue_final_message": True}, "messages[0].role"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
    ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:50])
def test_invalid_chat_fields_get_400_naming_the_field(server: Server, fields: dict[str, Any], param: str) -> None:
    answer = server.chat(messages=USER, **fields)
    assert answer.status == 400, answer.body
    assert answer.error()["param"] == param
    assert param.partition(".")[0].partition("[")[0] in str(answer.error()["message"])


def test_tool_call_and_reasoning_parsers_can_be_switched_off(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    from tok_server.openai.chat.endpoint import parse
    from tok_server.parsing import Markup
    from tok_server.settings import Formats
    from tok_server.wire.errors import ApiError

    body = json.dumps({"messages": USER, "tools": TOOLS}).encode()

    def markup(formats: Formats) -> Markup:
        return parse(body, server.engine, (NAME,), formats)[0].markup

    assert markup(Formats()).calls == "hermes"
    assert markup(Formats("llama3")).calls == "llama3"
    assert not markup(Formats(reasoning="none")).reasoning
    with pytest.raises(ApiError, match="--tool-call-parser"):
        markup(Formats("none"))


def test_openai_client_reads_tool_calls_whole_and_streamed(server: Server) -> None:
    more = {"chat_template_kwargs": {"script": "@call"}}
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(model=NAME, messages=USER, tools=TOOLS, extra_body=more)
        with client.chat.completions.stream(model=NAME, messages=USER, tools=TOOLS, extra_body=more) as stream:
            final = stream.get_final_completion()
    for found in (whole, final):
        calls: Any = found.choices[0].message.tool_calls
        (call,) = calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Paris"})
        assert found.choices[0].finish_reason == "tool_calls"
        assert found.choices[0].message.content == "Let me see."
