"""/v1/responses: fields beyond OpenAI's, fields without effect, formats beside forced calls, and truncation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, get_type_hints

import openai
import pytest
from openai.types.responses import ResponseFunctionToolCall
from openai.types.responses import response_create_params as theirs

from support.patience import PATIENCE
from support.scripted_model import CHAT_TEMPLATE, make_scripted_model
from support.serving import NAME, Answer, Server, serving
from tok_client.types import ResponseRequest, known_fields
from tok_core.text import ChatTemplate
from tok_server.openai.generation.job import GenerationJob
from tok_server.openai.responses.endpoint import parse

SCRIPTS = {"§hello": ["Hel", "lo, ", "world", "."]}
# Without "</think>" the model is taken for one that does not reason.
TEMPLATE = CHAT_TEMPLATE.replace("{{ script }}", "{{ (messages | last).content[-6:] }}").replace("</think>", "</hm>")
ENCRYPTED = "reasoning.encrypted_content"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(make_scripted_model(tmp_path_factory.mktemp("scripted") / "model", SCRIPTS, TEMPLATE)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=PATIENCE) as one:
        yield one


def ask(server: Server, **fields: Any) -> Answer:
    return server.call("POST", "/v1/responses", {"model": NAME, "input": "§hello", **fields})


def text_of(answer: Answer) -> str:
    assert answer.status == 200, answer.body
    output: Any = answer.json()["output"]
    return "".join(part["text"] for part in output[-1]["content"])


def parsed(server: Server, template: str = TEMPLATE, **fields: Any) -> GenerationJob:
    """Return the job of a request to a server whose model has this template."""
    source = ChatTemplate({"default": template}, {"bos_token": "", "eos_token": ""})
    engine: Any = SimpleNamespace(info=server.engine.info, tokenizer=server.engine.tokenizer, chat_template=source)
    return parse(json.dumps({"input": "§hello", **fields}).encode(), engine, (NAME,))[0]


def prompt_of(server: Server, job: GenerationJob) -> str:
    assert server.engine.tokenizer is not None
    return server.engine.tokenizer.decode(job.prompts[0], skip_special_tokens=False)


SAMPLING: dict[str, Any] = {
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "repetition_penalty": 1.5,
    "top_k": 7,
    "min_p": 0.125,
    "seed": 3,
    "ignore_eos": True,
    "priority": 2,
}


def test_sampling_fields_of_chat_completions_reach_the_job(server: Server) -> None:
    job = parsed(server, **SAMPLING, stop=["a", "b"])
    assert {name: getattr(job.params, name) for name in SAMPLING} == SAMPLING
    assert job.params.stop == ("a", "b")
    assert text_of(ask(server, stop="world", top_k=1, seed=1)) == "Hello, "
    answer = ask(server, ignore_eos=True, max_output_tokens=9)
    assert answer.json()["usage"]["output_tokens"] == 9  # type: ignore[index]


TOOLS = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS}], ids=["plain", "tools"])
@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [("o, world", "Hell", ["Hel", "lo, "]), ("rld", "Hello, wo", ["Hel", "lo, ", "world"])],
)
def test_response_logprobs_end_where_a_stop_string_ends_the_text(
    server: Server, fields: dict[str, Any], stop: str, text: str, tokens: list[str]
) -> None:
    asked = {"stop": stop, "include": ["message.output_text.logprobs"], **fields}
    *_, last_event = ask(server, **asked, stream=True).body.decode().strip().split("data: ")
    streamed = json.loads(last_event)["response"]
    found: list[Any] = [ask(server, **asked).json(), streamed]
    for response in found:
        (part,) = response["output"][0]["content"]
        assert (part["text"], [one["token"] for one in part["logprobs"]]) == (text, tokens)


def test_structured_outputs_and_template_variables_equal_those_of_chat(server: Server) -> None:
    assert text_of(ask(server, structured_outputs={"choice": ["maybe"]})) == "maybe"
    assert text_of(ask(server, structured_outputs={"regex": "[a-c]{5}"}, seed=1)).strip("abc") == ""
    job = parsed(server, chat_template_kwargs={"enable_thinking": False})
    assert "<think>\n\n</hm>" in prompt_of(server, job)


EXTENSIONS = {
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "top_k", "min_p", "seed", "stop", "ignore_eos"),
    *("priority", "cache_salt", "structured_outputs", "chat_template_kwargs"),
}


def test_response_request_has_openais_fields_and_the_extensions() -> None:
    fields = frozenset(get_type_hints(theirs.ResponseCreateParamsBase)) | {"stream"}
    assert known_fields(ResponseRequest) == fields | EXTENSIONS


SENT_BY_CLIENTS: dict[str, Any] = {
    "store": True,
    "service_tier": "flex",
    "max_tool_calls": 3,
    "include": ["web_search_call.results", "message.output_text.logprobs", ENCRYPTED],
    "reasoning": {"effort": "high", "summary": "auto", "generate_summary": "concise"},
    "text": {"verbosity": "low"},
}


def test_fields_without_effect_are_accepted_and_named_in_the_header(server: Server) -> None:
    for stream in (False, True):
        answer = ask(server, **SENT_BY_CLIENTS, stream=stream, zeta=1)
        assert answer.status == 200, answer.body
        assert answer.headers["x-tok-ignored"].split(",") == [
            *("store", "service_tier", "max_tool_calls", "zeta", "include[0]", "include[2]"),
            *("reasoning.summary", "reasoning.generate_summary", "reasoning.effort", "text.verbosity"),
        ]
    response = ask(server, **SENT_BY_CLIENTS).json()
    assert response["store"] is False
    assert response["reasoning"] == {"effort": "high", "summary": "auto"}
    assert response["text"] == {"format": {"type": "text"}, "verbosity": "low"}


def test_effort_and_verbosity_are_passed_to_a_template_that_takes_them(server: Server) -> None:
    template = TEMPLATE + "{{ reasoning_effort }}/{{ verbosity }}"
    job = parsed(server, template, reasoning={"effort": "minimal"}, text={"verbosity": "high"})
    assert prompt_of(server, job).endswith("minimal/high")
    assert job.ignored == ()
    assert parsed(server, reasoning={"effort": "none"}).ignored == ()
    rigid = CHAT_TEMPLATE.replace("enable_thinking", "other")
    assert parsed(server, rigid, reasoning={"effort": "none"}).ignored == ("reasoning.effort",)


SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def test_forced_call_beside_a_text_format_gives_the_call(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model=NAME,
        input="§hello",
        tools=[{"type": "function", "name": "City", "parameters": SCHEMA, "strict": None}],
        tool_choice={"type": "function", "name": "City"},
        text={"format": {"type": "json_schema", "name": "City", "strict": True, "schema": SCHEMA}},
        parallel_tool_calls=False,
    )
    (called,) = response.output
    assert isinstance(called, ResponseFunctionToolCall)
    assert json.loads(called.arguments)["city"] in ("Paris", "Rome")


def test_text_format_beside_optional_tools_constrains_the_text(server: Server) -> None:
    tools = [{"type": "function", "name": "City", "parameters": SCHEMA}]
    form = {"type": "json_schema", "name": "City", "schema": SCHEMA}
    answer = ask(server, tools=tools, text={"format": form}, parallel_tool_calls=False)
    item: Any = answer.json()["output"][-1]  # type: ignore[index]
    found = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
    assert json.loads(found)["city"] in ("Paris", "Rome")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def call_and_output(number: int) -> list[dict[str, Any]]:
    """Return a call and its output, with an id that later calls use again."""
    call_id = f"call_{number % 3}"
    return [
        {"type": "function_call", "call_id": call_id, "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": call_id, "output": f"seen {number} " + "word " * 20},
    ]


def test_truncation_auto_drops_the_oldest_turns_and_no_more_than_needed(server: Server) -> None:
    turns = [[user(f"turn {number} " + "word " * 30), {"role": "assistant", "content": "yes"}] for number in range(60)]
    turns[5].append({"role": "developer", "content": "new rules"})
    items = [item for turn in turns for item in turn] + [user("§hello")]
    fields: dict[str, Any] = {"instructions": "be kind", "max_output_tokens": 40}
    refused = ask(server, input=items, **fields)
    assert (refused.status, refused.error()["code"]) == (400, "context_length_exceeded")
    answer = ask(server, input=items, truncation="auto", **fields)
    assert text_of(answer) == "Hello, world."
    assert (answer.json()["truncation"], "x-tok-ignored" in answer.headers) == ("auto", False)
    job = parsed(server, input=items, truncation="auto", **fields)
    assert len(job.prompts[0]) + 40 <= server.engine.info.max_model_len
    prompt = prompt_of(server, job)
    assert "[system]be kind" in prompt
    assert "[system]new rules" in prompt
    kept = [number for number in range(60) if f"[user]turn {number} " in prompt]
    assert 1 < len(kept) < 60
    assert kept == list(range(kept[0], 60))
    assert prompt.count("[assistant]yes") == len(kept)
    one_more = [item for turn in turns[kept[0] - 1 :] for item in turn] + [user("§hello")]
    longer = parsed(server, input=[turns[5][2], *one_more], **fields)
    assert len(longer.prompts[0]) + 40 > server.engine.info.max_model_len


def test_truncation_auto_keeps_calls_together_with_their_outputs(server: Server) -> None:
    items = [user("look around"), *(item for number in range(60) for item in call_and_output(number))]
    prompt = prompt_of(server, parsed(server, input=items, truncation="auto"))
    outputs = [number for number in range(60) if f"[tool]seen {number} " in prompt]
    assert 1 < len(outputs) < 60
    assert outputs == list(range(outputs[0], 60))
    assert prompt.count("<tool_call>") == len(outputs)
    assert "look around" not in prompt


def test_truncation_auto_changes_nothing_that_fits(server: Server) -> None:
    items = [user("hi"), *call_and_output(0), user("§hello")]
    assert parsed(server, input=items, truncation="auto").prompts == parsed(server, input=items).prompts


def test_truncation_auto_refuses_what_cannot_be_made_to_fit(server: Server) -> None:
    newest_is_too_long = [user("hi"), {"role": "assistant", "content": "yes"}, user("word " * 3000)]
    for fields, name in (
        ({"input": newest_is_too_long}, "input"),
        ({"input": [user("hi"), user("§hello")], "max_output_tokens": 10**6}, "max_output_tokens"),
        ({"input": [user("hi"), {"role": "user", "content": [{"type": "input_image"}]}]}, "input[1].content[0].type"),
    ):
        answer = ask(server, truncation="auto", **fields)
        assert (answer.status, answer.error()["param"]) == (400, name)
