"""/v1/responses: input and output items, whole and as events, also through OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from itertools import count
from typing import Any

import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response as TheirResponse
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseReasoningItem
from pydantic import BaseModel

from support.patience import PATIENCE
from support.scripted_model import CHAT_TEMPLATE, make_scripted_model
from support.serving import NAME, Answer, Server, serving
from support.tolerance import near
from tok_client.types import (
    FunctionCallArgumentsDelta,
    FunctionCallItem,
    OutputItem,
    OutputItemDone,
    OutputMessage,
    OutputTextDelta,
    ReasoningItem,
    ReasoningTextDelta,
    Response,
    ResponseEvent,
    ResponseFailed,
    ResponseRequest,
    known_fields,
)
from tok_core import Delta, RequestOutput
from tok_core.text import Detokeniser
from tok_server.openai.generation.job import GenerationJob
from tok_server.openai.generation.serializer import TokenTexts
from tok_server.openai.responses.endpoint import parse
from tok_server.openai.responses.output import ResponseOutput
from tok_server.openai.responses.serializer import ResponseSerializer
from tok_server.parsing.pieces import ArgumentsPiece, CallBegin, ContentPiece, Piece, ReasoningPiece
from tok_server.wire.errors import unavailable

# The end of the user's message names the script; its pieces are the tokens that the model writes one by one.
SCRIPTS = {
    "§hello": ["Hel", "lo, ", "world", "."],
    "§calls": ["Let me", " see.\n", "<tool_call>", '\n{"name": "wea', 'ther", "arguments": ', '{"city": ', '"Par',
               'is"}', "}\n</tool_call>"],
    "§think": ["<think>", "\nhm, ", "is it", "\n</think>", "\n\nIt", " is."],
    "§plans": ["<think>so", "</think>\n<tool_call>", '{"name": "weather", ', '"arguments": {"city": "Rome"}}'],
    "§jsons": ['{"answer"', ": 4", "2}"],
}  # fmt: skip
LAST_WORDS = "{{ (messages | selectattr('role', 'equalto', 'user') | list | last).content[-6:] }}"
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
DECODE = msgspec.json.Decoder(ResponseEvent).decode


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    template = CHAT_TEMPLATE.replace("{{ script }}", LAST_WORDS)
    with serving(make_scripted_model(tmp_path_factory.mktemp("scripted") / "model", SCRIPTS, template)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=PATIENCE) as one:
        yield one


def ask(server: Server, **fields: Any) -> Answer:
    return server.call("POST", "/v1/responses", {"model": NAME, **fields})


def whole(server: Server, **fields: Any) -> Response:
    """Return the response, after a check that its events give the same one but for ids and times."""
    answer = ask(server, **fields)
    assert answer.status == 200, answer.body
    assert TheirResponse.model_validate_json(answer.body).id.startswith("resp_")
    found = msgspec.json.decode(answer.body, type=Response)
    events = streamed(server, **fields)
    check_events(events)
    # Log-probabilities differ in their last bits with the other requests of a step.
    assert near(plain(events[-1].response), plain(found))  # type: ignore[union-attr]
    return found


def streamed(server: Server, **fields: Any) -> list[ResponseEvent]:
    answer = ask(server, **fields, stream=True)
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events_of(answer.body)


def events_of(body: bytes) -> list[ResponseEvent]:
    *blocks, rest = body.decode().split("\n\n")
    assert rest == ""
    found = []
    for block in blocks:
        name, data = block.split("\n")
        found.append(DECODE(data.removeprefix("data: ")))
        assert name == f"event: {found[-1].type}"
    return found


def check_events(events: list[ResponseEvent]) -> None:
    """Check that the events of every item come in order and that the last event has all items."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    created, in_progress, *told, last = events
    assert (created.type, in_progress.type) == ("response.created", "response.in_progress")
    assert created.response.output == in_progress.response.output == []  # type: ignore[union-attr]
    assert last.type in ("response.completed", "response.incomplete")
    check_items(told, items_of(last.response))


def items_of(response: Response) -> list[OutputItem]:
    """Return the items of a response; this server sends only known types."""
    assert not any(isinstance(item, dict) for item in response.output)
    return [item for item in response.output if not isinstance(item, dict)]


def check_items(told: list[ResponseEvent], items: list[OutputItem]) -> None:
    for index, item in enumerate(items):
        own = [event for event in told if event.output_index == index]  # type: ignore[union-attr]
        assert own == told[: len(own)]
        del told[: len(own)]
        gained = "".join(
            event.delta
            for event in own
            if isinstance(event, OutputTextDelta | ReasoningTextDelta | FunctionCallArgumentsDelta)
        )
        assert gained == text_of(item)
        assert isinstance(own[-1], OutputItemDone)
        assert own[-1].item == item
        kinds = [event.type.removeprefix("response.") for event in own if not event.type.endswith(".delta")]
        match item:
            case FunctionCallItem():
                assert kinds == ["output_item.added", "function_call_arguments.done", "output_item.done"]
            case _:
                done = "output_text.done" if isinstance(item, OutputMessage) else "reasoning_text.done"
                middle = ["content_part.added", done, "content_part.done"]
                assert kinds == ["output_item.added", *middle, "output_item.done"]
    assert not told


def text_of(item: OutputItem) -> str:
    return item.arguments if isinstance(item, FunctionCallItem) else "".join(part.text for part in item.content)


def plain(response: Response) -> object:
    """Return the response without ids, times and cached tokens: the second time, the prompt is in the cache."""
    assert response.usage is not None
    usage = msgspec.structs.replace(response.usage, input_tokens_details=None)
    output = [msgspec.structs.replace(item, id="") for item in items_of(response)]
    output = [
        msgspec.structs.replace(item, call_id="") if isinstance(item, FunctionCallItem) else item for item in output
    ]
    return msgspec.to_builtins(msgspec.structs.replace(response, id="", created_at=0, usage=usage, output=output))


def test_text_input_is_answered_by_one_message_item(server: Server) -> None:
    response = whole(server, input="say §hello", temperature=0, metadata={"a": "b"}, user="u", instructions="be kind")
    (item,) = response.output
    assert isinstance(item, OutputMessage)
    assert (text_of(item), item.status, response.status) == ("Hello, world.", "completed", "completed")
    assert (response.metadata, response.user, response.instructions) == ({"a": "b"}, "u", "be kind")
    assert (response.temperature, response.store, response.incomplete_details) == (0, False, None)
    assert response.usage is not None
    assert response.usage.output_tokens == 5
    assert response.usage.total_tokens == response.usage.input_tokens + 5


def test_response_cut_off_by_max_output_tokens_is_incomplete(server: Server) -> None:
    response = whole(server, input="say §hello", max_output_tokens=2)
    (item,) = items_of(response)
    assert (response.status, text_of(item), item.status) == ("incomplete", "Hello, ", "incomplete")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert items_of(whole(server, input="§think", max_output_tokens=1))[0].status == "incomplete"


def test_tool_calls_and_reasoning_are_separate_items(server: Server) -> None:
    said, called = items_of(whole(server, input="§calls", tools=[WEATHER]))
    assert isinstance(called, FunctionCallItem)
    assert (text_of(said), called.name, called.arguments) == ("Let me see.", "weather", '{"city": "Paris"}')
    response = whole(server, input="§think")
    thought, said = items_of(response)
    assert isinstance(thought, ReasoningItem)
    assert (text_of(thought), text_of(said)) == ("hm, is it", "It is.")
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == 4
    thought, called = items_of(whole(server, input="§plans", tools=[WEATHER]))
    assert (text_of(thought), text_of(called)) == ("so", '{"city": "Rome"}')
    (said,) = items_of(whole(server, input="§calls", tools=[WEATHER], tool_choice="none"))
    assert text_of(said) == "".join(SCRIPTS["§calls"])


@pytest.mark.parametrize("fields", [{"input": "§hello"}, {"input": "§think"}, {"input": "§calls", "tools": [WEATHER]}])
def test_response_logprobs_cover_exactly_the_message_text(server: Server, fields: dict[str, Any]) -> None:
    response = whole(server, **fields, include=["message.output_text.logprobs"], top_logprobs=2, temperature=0)
    message = next(item for item in response.output if isinstance(item, OutputMessage))
    (part,) = message.content
    assert "".join(one.token for one in part.logprobs).strip() == part.text
    assert {len(one.top_logprobs) for one in part.logprobs} == {2}
    assert all(one.logprob == one.top_logprobs[0].logprob for one in part.logprobs)


@pytest.mark.parametrize("together", [1, 2, 3, 100])
def test_response_logprobs_do_not_depend_on_tokens_per_delta(server: Server, together: int) -> None:
    asked = {"input": "§calls", "tools": [WEATHER], "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    job, initial = parsed(server, **asked, temperature=0)

    async def computed() -> RequestOutput:
        return await server.engine.generate(job.prompts[0], job.params).output()

    output = asyncio.run_coroutine_threadsafe(computed(), server.loop).result(PATIENCE)
    (sample,) = output.outputs
    texts, detokeniser = TokenTexts(server.engine.tokenizer), Detokeniser(server.engine.tokenizer)  # type: ignore[arg-type]
    serializer, events = ResponseSerializer(job, initial, texts), list[ResponseEvent]()
    for first in range(0, len(sample.token_ids), together):
        ids = sample.token_ids[first : first + together]
        last = first + together >= len(sample.token_ids)
        text = detokeniser.push(ids[:-1] if last else ids) + (detokeniser.finish() if last else "")
        logprobs = (sample.logprobs or [])[first : first + together]
        events += events_of(
            serializer.encode_delta(0, Delta(0, ids, text, logprobs, sample.finish_reason if last else None))
        )
    wanted = msgspec.json.decode(ResponseSerializer(job, initial, texts).encode_answer([output]), type=Response)
    (said,) = (one.item for one in events if isinstance(one, OutputItemDone) and isinstance(one.item, OutputMessage))
    (message,) = (item for item in wanted.output if isinstance(item, OutputMessage))
    assert "".join(one.token for one in message.content[0].logprobs) == "Let me see.\n"
    assert said.content[0].logprobs == message.content[0].logprobs


def prompt_of(server: Server, **fields: Any) -> str:
    """Return the rendered prompt of a request."""
    job, _ = parsed(server, **fields)
    assert server.engine.tokenizer is not None
    return server.engine.tokenizer.decode(job.prompts[0], skip_special_tokens=False)


def parsed(server: Server, **fields: Any) -> tuple[GenerationJob, Response]:
    job, serializer = parse(json.dumps(fields).encode(), server.engine, (NAME,))
    return job, serializer.initial


def test_response_input_items_become_chat_messages(server: Server) -> None:
    items = [
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": [{"type": "input_text", "text": "hi "}, {"type": "input_text", "text": "you"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "let me see", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "sunny"}]},
        {"type": "message", "role": "assistant", "content": "it is sunny"},
        {"type": "message", "role": "assistant", "content": "really"},
        {"type": "message", "role": "user", "content": "thanks"},
    ]
    text = prompt_of(server, input=items, instructions="be kind", tools=[WEATHER])
    function = {name: value for name, value in WEATHER.items() if name != "type"}
    assert json.dumps({"type": "function", "function": function}) in text
    end = "<|eot_id|>"
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    assert text.partition("[system]")[2] == (
        f"be kind{end}[system]rules{end}[user]hi you{end}[assistant]<think>hm</think>let me see{call}{end}"
        f"[tool]sunny{end}[assistant]it is sunny{end}[assistant]really{end}[user]thanks{end}[assistant]thanks"
    )


def test_output_items_can_be_sent_back_as_input(server: Server, client: openai.OpenAI) -> None:
    tools: Any = [WEATHER]
    first = client.responses.create(model=NAME, input="§plans", tools=tools, store=False)
    thought, called = first.output
    assert isinstance(thought, ResponseReasoningItem)
    assert isinstance(called, ResponseFunctionToolCall)
    items: Any = [
        {"role": "user", "content": "§plans"},
        *(item.to_dict() for item in first.output),
        {"type": "function_call_output", "call_id": called.call_id, "output": "sunny"},
        {"role": "user", "content": "§hello"},
    ]
    second = client.responses.create(model=NAME, input=items, tools=tools)
    assert second.output_text == "Hello, world."
    text = prompt_of(server, input=items, tools=tools)
    assert '<think>so</think><tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>' in text


class Found(BaseModel):
    answer: int


def test_openai_client_reads_whole_streamed_and_parsed_responses(client: openai.OpenAI) -> None:
    created = client.responses.create(model=NAME, input="§hello")
    assert created.output_text == "Hello, world."
    assert isinstance(created.output[0], ResponseOutputMessage)
    events = list(client.responses.create(model=NAME, input="§hello", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    with client.responses.stream(model=NAME, input="§calls", tools=[WEATHER]) as stream:  # type: ignore[list-item]
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(texts) == final.output_text == "Let me see."
    called = final.output[1]
    assert called.type == "function_call"
    assert json.loads(called.arguments) == {"city": "Paris"}
    parsed_answer = client.responses.parse(model=NAME, input="§jsons", text_format=Found)
    assert parsed_answer.output_parsed == Found.model_validate_json(parsed_answer.output_text)
    with client.responses.stream(model=NAME, input="§jsons", text_format=Found) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Found)


def test_text_format_tools_and_reasoning_effort_reach_the_job(server: Server) -> None:
    schema = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
    for form in ({"type": "json_object"}, {"type": "json_schema", "name": "found", "schema": schema, "strict": True}):
        job, initial = parsed(server, input="§hello", text={"format": form})
        assert job.params.grammar is not None
        assert msgspec.to_builtins(initial.text.format) == form
    for choice in ("required", {"type": "function", "name": "weather"}):
        job, initial = parsed(server, input="§hello", tools=[WEATHER], tool_choice=choice)
        assert job.params.grammar is not None
        assert msgspec.to_builtins(initial.tool_choice) == choice
    some = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]}
    job, _ = parsed(server, input="§hello", tools=[WEATHER, {**WEATHER, "name": "time"}], tool_choice=some)
    assert job.markup.tools == {"weather"}
    job, initial = parsed(server, input="§hello", tools=[WEATHER], parallel_tool_calls=False)
    assert not job.markup.parallel
    assert not initial.parallel_tool_calls
    assert "<think>\n\n</think>" in prompt_of(server, input="§hello", reasoning={"effort": "none"})
    job, _ = parsed(server, input="§hello", temperature=0.5, top_p=0.25, max_output_tokens=7)
    assert (job.params.temperature, job.params.top_p, job.params.max_tokens, job.params.n) == (0.5, 0.25, 7, 1)


NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("store", "background"), False),
    **dict.fromkeys(("previous_response_id", "conversation", "max_tool_calls")),
    "truncation": "disabled",
    "service_tier": "auto",
    "prompt_cache_retention": "in_memory",
    "prompt_cache_options": {},
    "include": [],
    "metadata": {"a": "b"},
    "safety_identifier": "x",
    "prompt_cache_key": "y",
    "text": {"format": {"type": "text"}, "verbosity": "medium"},
    "reasoning": {"effort": None, "summary": None, "context": "auto", "mode": "standard"},
    "tools": [],
    "tool_choice": "auto",
    "top_logprobs": 0,
    "n": 1,
}

BAD: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"background": True}, "background"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"truncation": "middle"}, "truncation"),
    ({"truncation": "auto", "input": "word " * 2000}, "input"),
    ({"truncation": "auto", "max_output_tokens": 10**6}, "max_output_tokens"),
    ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ({"moderation": {"model": "x"}}, "moderation"),
    ({"service_tier": "slow"}, "service_tier"),
    ({"include": ["reasoning.encrypted_content", "everything"]}, "include[1]"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": 99, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
    ({"text": {"verbosity": "loud"}}, "text.verbosity"),
    ({"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
    ({"reasoning": {"effort": "utmost"}}, "reasoning.effort"),
    ({"reasoning": {"context": "all_turns"}}, "reasoning.context"),
    ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": 3}, "frequency_penalty"),
    ({"seed": "x"}, "seed"),
    ({"stop": ""}, "stop"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"priority": -5}, "priority"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"chat_template_kwargs": {"no_such": 1}}, "chat_template_kwargs.no_such"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
    ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools"),
    ({"tools": [WEATHER], "tool_choice": {"type": "file_search"}}, "tool_choice.type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 10**6}, "max_output_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": "word " * 2000}, "input"),
    ({"input": [{"content": "hi"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type"),
    ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": ""}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
    ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "e"}]}, "input[0].encrypted_content"),
    ({"messages": [{"role": "user", "content": "hi"}]}, "messages"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"n": 2}, "n"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "name"), BAD)
def test_unsupported_response_field_gets_400_naming_the_field(
    server: Server, fields: dict[str, Any], name: str
) -> None:
    answer = ask(server, **{"input": "§hello", **fields})
    assert answer.status == 400, answer.body
    error = answer.error()
    assert error["param"] == name
    assert str(name).split("[")[0].split(".")[0] in str(error["message"])
    assert not {"messages", "response_format"} - fields.keys() & set(str(error["message"]).split())


def test_neutral_values_are_accepted_and_unknown_fields_are_listed(server: Server) -> None:
    answer = ask(server, input="§hello", **NEUTRAL, nonsense=1)
    assert answer.status == 200, answer.body
    assert answer.headers["x-tok-ignored"] == "nonsense"
    assert ask(server, input="§hello", model="other").status == 404


def test_every_openai_response_field_is_honoured_or_refused() -> None:
    tested = {name for fields, _ in BAD for name in fields} | NEUTRAL.keys()
    carried_out = {"model", "instructions", "user", "stream", "parallel_tool_calls", "metadata", "cache_salt"}
    assert known_fields(ResponseRequest) <= tested | carried_out


def test_failure_in_a_response_stream_sends_failed_and_error_events(server: Server) -> None:
    job, initial = parsed(server, input="§hello")
    serializer = ResponseSerializer(job, initial, TokenTexts(server.engine.tokenizer))
    opening = events_of(serializer.encode_opening())
    failed, error, rest = serializer.encode_failure(unavailable("the engine died", "engine_unavailable")).split(b"\n\n")
    (event,) = events_of(failed + b"\n\n")
    assert isinstance(event, ResponseFailed)
    assert event.sequence_number == len(opening)
    assert (event.response.status, event.response.error.code) == ("failed", "server_error")  # type: ignore[union-attr]
    assert json.loads(error.removeprefix(b"data: "))["error"]["message"] == "the engine died"
    assert rest == b""


TEXTS = st.sampled_from(["a", "bc", "é"])
PIECES = st.lists(
    st.one_of(
        st.builds(ContentPiece, TEXTS),
        st.builds(ReasoningPiece, TEXTS),
        st.builds(CallBegin, st.sampled_from(["f", "g"])),
        st.builds(ArgumentsPiece, TEXTS),
    ),
    max_size=8,
)


@given(PIECES, st.booleans())
def test_response_events_of_any_pieces_add_up_to_the_items(pieces: list[Piece], complete: bool) -> None:
    calls = [index for index, piece in enumerate(pieces) if isinstance(piece, CallBegin)]
    pieces = [
        piece
        for index, piece in enumerate(pieces)
        if not isinstance(piece, ArgumentsPiece) or (index and isinstance(pieces[index - 1], CallBegin))
    ]
    output = ResponseOutput(count())
    events: list[ResponseEvent] = []
    for piece in pieces:
        events += output.add([piece], [])
    events += output.end(complete=complete)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert output.items[-1].status == ("completed" if complete else "incomplete")
    assert all(item.status == "completed" for item in output.items[:-1])
    assert len([item for item in output.items if isinstance(item, FunctionCallItem)]) == len(calls)
    told = "".join(piece.text for piece in pieces if not isinstance(piece, CallBegin))
    assert "".join(map(text_of, output.items)) == told
    check_items(events, output.items)
