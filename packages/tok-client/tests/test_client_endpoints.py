"""Tests of every endpoint of both clients, and of its types, against the real server."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from support.batching import assert_each_once, completion_line, jsonl
from support.scripted_model import make_scripted_model
from support.serving import NAME, Server, serving
from tok_client import (
    AsyncClient,
    BadRequestError,
    Client,
    Completion,
    NotFoundError,
    PermissionDeniedError,
    majority,
    read_answers,
)
from tok_client import types as wire

SCRIPTS = {
    "@call": ["<tool_call>", '{"name": "weather", ', '"arguments": {"city": ', '"Paris"}}', "</tool_call>"],
    "@think": ["<think>", "\nhm, ", "is it", "\n</think>", "\n\nIt", " is."],
}
WEATHER = wire.FunctionTool(function=wire.FunctionDefinition(name="weather", description="of a city"))
USER = [wire.UserMessage(content="hi")]


@pytest.fixture(scope="module")
def full_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = make_scripted_model(tmp_path_factory.mktemp("scripted") / "model", SCRIPTS)
    with serving(model, data_dir=str(tmp_path_factory.mktemp("data"))) as running:
        yield running


@pytest.fixture(scope="module")
def client(full_server: Server) -> Iterator[Client]:
    with Client(full_server.url) as found:
        yield found


@pytest_asyncio.fixture
async def async_client(full_server: Server) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(full_server.url) as found:
        yield found


async def test_a_tool_call_is_the_same_whole_and_streamed(client: Client, async_client: AsyncClient) -> None:
    asked = client.chat.completions.create(
        model=NAME, messages=USER, tools=[WEATHER], chat_template_kwargs={"script": "@call"}
    )
    (choice,) = asked.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    (call,) = choice.message.tool_calls
    assert isinstance(call, wire.FunctionToolCall)
    assert (call.function.name, msgspec.json.decode(call.function.arguments)) == ("weather", {"city": "Paris"})
    name = arguments = ""
    async with await async_client.chat.completions.create(
        model=NAME, messages=USER, tools=[WEATHER], chat_template_kwargs={"script": "@call"}, stream=True
    ) as stream:
        async for chunk in stream:
            for piece in chunk.choices[0].delta.tool_calls or []:
                assert piece.function
                name, arguments = name + (piece.function.name or ""), arguments + (piece.function.arguments or "")
    assert (name, arguments) == ("weather", call.function.arguments)


def test_a_tool_result_can_be_sent_back_with_its_tool_call(client: Client) -> None:
    asked = client.chat.completions.create(
        model=NAME, messages=USER, tools=[WEATHER], chat_template_kwargs={"script": "@call"}
    )
    said = asked.choices[0].message
    assert said.tool_calls
    result = wire.ToolMessage(content="sunny", tool_call_id=said.tool_calls[0].id)
    after = client.chat.completions.create(
        model=NAME, messages=[*USER, said, result], tools=[WEATHER], chat_template_kwargs={"script": "@think"}
    )
    assert after.choices[0].message.content == "It is."


def test_chat_reasoning_is_returned_as_reasoning_content(client: Client) -> None:
    asked = client.chat.completions.create(model=NAME, messages=USER, chat_template_kwargs={"script": "@think"})
    message = asked.choices[0].message
    assert message.reasoning_content
    assert message.reasoning_content.strip() == "hm, is it"
    assert asked.usage
    assert asked.usage.completion_tokens_details
    assert asked.usage.completion_tokens_details.reasoning_tokens


def test_structured_outputs_follow_a_json_schema_or_choice(client: Client) -> None:
    schema = wire.JsonSchema(name="yes", schema={"type": "boolean"}, strict=True)
    text = client.chat.completions.create(
        model=NAME,
        messages=USER,
        response_format=wire.JsonSchemaFormat(json_schema=schema),
        chat_template_kwargs={"script": "@think"},  # without the script, the model may think until `max_tokens`
        max_tokens=40,
    )
    assert text.choices[0].message.content in ("true", "false")
    made = client.completions.create(
        model=NAME, prompt="a", structured_outputs=wire.StructuredOutputs(choice=["yes", "no"]), n=4, max_tokens=20
    )
    assert {choice.text for choice in made.choices} <= {"yes", "no"}


def test_stop_when_majority_is_met_and_reported(client: Client) -> None:
    asked = client.completions.create(
        model=NAME,
        prompt="a",
        n=8,
        max_tokens=20,
        structured_outputs={"regex": "(yes|no)"},
        stop_when=wire.Majority(margin=2, pattern="(yes|no)"),
        seed=1,
    )
    told = asked.stop_when
    assert told
    assert told.met
    assert told.finished + told.cancelled == 8
    finished = [choice.text for choice in asked.choices if choice.finish_reason != "stop_when"]
    assert majority(finished) == next(iter(told.answers))


async def test_a_response_is_the_same_whole_and_streamed(client: Client, async_client: AsyncClient) -> None:
    asked = client.responses.create(model=NAME, input="the quick", max_output_tokens=6, temperature=0)
    (message,) = asked.output
    assert isinstance(message, wire.OutputMessage)
    assert asked.status in ("completed", "incomplete")
    async with await async_client.responses.create(
        model=NAME, input=[{"role": "user", "content": "the quick"}], max_output_tokens=6, temperature=0, stream=True
    ) as stream:
        events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if isinstance(event, wire.OutputTextDelta))
    assert text == message.content[0].text != ""
    assert isinstance(events[-1], wire.ResponseCompleted | wire.ResponseIncomplete)
    assert events[-1].response.status == asked.status
    assert events[-1].response.usage
    assert asked.usage
    assert events[-1].response.usage.total_tokens == asked.usage.total_tokens
    again = client.responses.create(
        model=NAME, input=[wire.InputItem(role="user", content="the quick"), *asked.output], max_output_tokens=1
    )
    assert again.usage
    assert again.usage.input_tokens > asked.usage.input_tokens


async def test_base64_and_float_embeddings_are_equal(client: Client, async_client: AsyncClient) -> None:
    packed = await async_client.embeddings.create(model=NAME, input=["the quick", "fox"], pooling="mean")
    plain = client.embeddings.create(model=NAME, input=["the quick", "fox"], pooling="mean", encoding_format="float")
    assert isinstance(packed.data[0].embedding, str)
    assert isinstance(plain.data[0].embedding, list)
    for ours, theirs in zip(packed.data, plain.data, strict=True):
        assert ours.vector() == pytest.approx(theirs.vector(), abs=1e-6)
        assert math.hypot(*ours.vector()) == pytest.approx(1, abs=1e-5)
    assert packed.usage.prompt_tokens == plain.usage.prompt_tokens > 2


def test_malformed_base64_embeddings_are_refused() -> None:
    for text in ("AAA=", "AAAA", "?"):
        with pytest.raises(ValueError, match=r".+"):
            wire.Embedding(index=0, embedding=text).vector()


async def test_tokenize_and_detokenize_texts_and_chats(client: Client, async_client: AsyncClient) -> None:
    found = client.tokenize(prompt="the quick fox", return_token_strs=True)
    assert found.count == len(found.tokens) == len(found.token_strs or [])
    assert "the quick fox" in (await async_client.detokenize(found.tokens, model=NAME)).prompt
    chat = await async_client.tokenize(messages=[{"role": "user", "content": "the quick fox"}], model=NAME)
    assert chat.count > found.count
    with pytest.raises(ValueError, match="prompt and messages are both missing"):
        client.tokenize()
    assert client.tokenize(messages=({"role": "user", "content": "the quick fox"},)) == chat
    with pytest.raises(BadRequestError, match=r"tokens\[0\] is -1"):
        client.detokenize([-1])


async def test_texts_are_scored_and_reranked(client: Client, async_client: AsyncClient) -> None:
    scores = client.score(text_1="one fox", text_2=["two dogs", "one fox"], model=NAME)
    assert scores == msgspec.structs.replace(
        await async_client.score(text_1="one fox", text_2=["two dogs", "one fox"]), id=scores.id, created=scores.created
    )
    assert scores.data[1].score == pytest.approx(1)
    assert scores.data[0].score < 0.999
    ordered = client.rerank(query="one fox", documents=["two dogs", "one fox"], top_n=1, return_documents=False)
    assert [one.index for one in ordered.results] == [1]
    both = await async_client.rerank(query="one fox", documents=["two dogs", "one fox"])
    assert [one.relevance_score for one in both.results] == pytest.approx([1, scores.data[0].score])
    with pytest.raises(ValueError, match="text_1 has 2 texts"):
        client.score(text_1=["a", "b"], text_2="c")


async def test_status_endpoints_answer_and_admin_endpoints_are_denied(
    client: Client, async_client: AsyncClient
) -> None:
    assert (await async_client.health()).status == client.health().status == "ready"
    assert (await async_client.ready()).ready
    assert client.ready() == wire.ReadyReport(ready=True, status="ready")
    assert client.load() == await async_client.load() == wire.LoadReport(server_load=0)
    assert client.version() == await async_client.version()
    assert "# TYPE" in client.metrics()
    assert "# TYPE" in await async_client.metrics()
    with pytest.raises(PermissionDeniedError, match="admin"):
        client.restart_replica(0)
    with pytest.raises(PermissionDeniedError, match="admin"):
        await async_client.restart_replica(0)


async def test_a_batch_runs_from_its_input_file_to_its_output_file(
    client: Client, async_client: AsyncClient, tmp_path: Path
) -> None:
    lines = [completion_line(number) for number in range(5)]
    source = tmp_path / "naïve.jsonl"
    source.write_bytes(jsonl(lines))
    kept = wire.ExpiresAfter(anchor="created_at", seconds=3600)
    file = await async_client.files.create(file=source, expires_after=kept)
    assert (file.filename, file.bytes, file.expires_at) == (source.name, source.stat().st_size, file.created_at + 3600)
    assert client.files.retrieve(file.id) == await async_client.files.retrieve(file.id) == file
    assert client.files.content(file.id) == source.read_bytes()

    begun = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", metadata={"who": "me"})
    done = await async_client.batches.wait(begun.id, poll=0.02)
    assert (done.status, done.metadata) == ("completed", {"who": "me"})
    assert client.batches.wait(begun.id) == client.batches.retrieve(begun.id) == done
    assert done.output_file_id
    target = tmp_path / "answers.jsonl"
    size = await async_client.files.save(done.output_file_id, target)
    assert (size, list(tmp_path.glob("*.part"))) == (target.stat().st_size, [])
    assert_each_once(lines, target.read_bytes())
    answers = [msgspec.json.decode(line, type=wire.BatchAnswer) for line in target.read_bytes().splitlines()]
    assert [answer.response.status_code for answer in answers if answer.response] == [200] * 5

    assert done in client.batches.list(limit=5).data
    assert client.batches.list(after=begun.id).data == []
    with pytest.raises(BadRequestError, match="limit"):
        await async_client.batches.list(limit=0)


def test_files_are_listed_and_deleted(client: Client, tmp_path: Path) -> None:
    made = [client.files.create(file=jsonl([completion_line(number)]), filename=f"{number}") for number in range(3)]
    page = client.files.list(limit=2, order="desc", purpose="batch")
    assert [file.id for file in page.data] == [made[2].id, made[1].id]
    assert page.has_more
    assert page.last_id
    assert client.files.list(after=page.last_id, limit=1).data == [made[0]]
    assert client.files.save(made[0].id, tmp_path / "0") == made[0].bytes
    assert client.files.delete(made[0].id).deleted
    for missing in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(NotFoundError):
            missing(made[0].id)
    with pytest.raises(NotFoundError):
        client.files.save(made[0].id, tmp_path / "1")
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    with pytest.raises(ValueError, match="file_id is ''"):
        client.files.retrieve("")


def test_a_batch_is_cancelled(client: Client) -> None:
    lines = [completion_line(number, max_tokens=200, ignore_eos=True) for number in range(300)]
    file = client.files.create(file=jsonl(lines))
    begun = client.batches.create(input_file_id=file.id, endpoint="/v1/completions")
    assert client.batches.cancel(begun.id).status in ("cancelling", "cancelled")
    assert client.batches.wait(begun.id, poll=0.02).status == "cancelled"


async def test_map_writes_and_resumes_an_output_file(client: Client, async_client: AsyncClient, tmp_path: Path) -> None:
    asked = [[number + 1, 5] for number in range(40)]
    output = tmp_path / "out.jsonl"
    half = [
        one async for one in async_client.completions.map(asked[:20], model=NAME, max_tokens=3, seed=1, output=output)
    ]
    rest = list(client.completions.map(asked, model=NAME, max_tokens=3, seed=1, output=output, ordered=False))
    assert [one.index for one in half] == list(range(20))
    assert sorted(one.index for one in rest) == list(range(20, 40))
    saved = {one.index: one.answer for one in read_answers(output, Completion)}
    assert saved == {one.index: one.result() for one in [*half, *rest]}


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_base_url_may_leave_out_v1(full_server: Server, path: str) -> None:
    with Client(f"http://127.0.0.1:{full_server.port}{path}") as found:
        assert [one.id for one in found.models.list().data] == [NAME]
        assert found.health().status == "ready"
