"""Tests of unmodified clients against `tok serve` of the demo model: openai, lm-eval, LangChain, LiteLLM."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from openai.lib._pydantic import to_strict_json_schema
from pydantic import BaseModel

from support.conformance import NAME, served
from support.conformance_lm_eval import CHAT, CHOICE, DOCUMENTS, PLAIN
from support.patience import PATIENCE

QUESTION = "Tom buys 4 books for 12 dollars each and 3 pens for 5 dollars each. How much does he spend in all?"
USER: Any = [{"role": "user", "content": QUESTION}]
LINE = {"custom_id": "one", "method": "POST", "url": "/v1/chat/completions"}
TESTS = Path(__file__).parent


class Purchase(BaseModel):
    """A purchase."""

    buyer: Literal["Tom", "Ann"]
    things: list[Literal["books", "pens"]]
    dear: bool


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]


WEATHER: Any = openai.pydantic_function_tool(Weather, name="weather")
CALL: Any = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("conformance")


@pytest.fixture(scope="module")
def url(directory: Path) -> Iterator[str]:
    """The server's address, without /v1."""
    with served(directory) as address:
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as one:
        yield one


@pytest.fixture(scope="module")
def solution(client: openai.OpenAI) -> str:
    """The model's answer to the question."""
    found = client.chat.completions.create(model=NAME, messages=USER, temperature=0).choices[0]
    assert found.finish_reason == "stop"
    assert found.message.content is not None
    assert found.message.content.endswith("#### 63")
    return found.message.content


def run_client(name: str, *arguments: str, given: str = "") -> Any:
    """Run the client in a process of its own and return the JSON that it prints last."""
    command = [sys.executable, "-m", f"support.conformance_{name}", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, input=given, capture_output=True, text=True, env=environment, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_openai_sync_and_async_clients_stream_the_whole_answer(client: openai.OpenAI, url: str, solution: str) -> None:
    with client.chat.completions.stream(model=NAME, messages=USER, temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        assert stream.get_final_completion().choices[0].message.content == text == solution

    async def by_the_other() -> str:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as other:
            chunks = await other.chat.completions.create(model=NAME, messages=USER, temperature=0, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    assert asyncio.run(by_the_other()) == solution
    prompt = f"Question: {QUESTION}\nAnswer:"
    assert client.completions.create(model=NAME, prompt=prompt, max_tokens=100, temperature=0).choices[0].text


def test_openai_calls_a_tool_and_continues_with_its_result(client: openai.OpenAI) -> None:
    message = client.chat.completions.parse(model=NAME, messages=USER, temperature=0, **CALL).choices[0].message
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)
    with client.chat.completions.stream(model=NAME, messages=USER, temperature=0, **CALL) as stream:
        streamed = (stream.get_final_completion().choices[0].message.tool_calls or [])[0]
    assert (streamed.function.name, streamed.function.arguments) == (call.function.name, call.function.arguments)
    told: Any = [*USER, message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    after = client.chat.completions.create(model=NAME, messages=told, tools=[WEATHER], max_tokens=5)
    assert after.choices[0].message.content


def test_openai_parses_structured_outputs(client: openai.OpenAI) -> None:
    found = client.chat.completions.parse(model=NAME, messages=USER, temperature=0, response_format=Purchase)
    assert isinstance(found.choices[0].message.parsed, Purchase)
    with client.chat.completions.stream(model=NAME, messages=USER, temperature=0, response_format=Purchase) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == found.choices[0].message.parsed


def test_openai_creates_streams_and_parses_responses(client: openai.OpenAI, solution: str) -> None:
    whole = client.responses.create(model=NAME, input=QUESTION, temperature=0)
    assert (whole.status, whole.output_text) == ("completed", solution)
    with client.responses.stream(model=NAME, input=QUESTION, temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text == solution
    parsed = client.responses.parse(model=NAME, input=QUESTION, temperature=0, text_format=Purchase)
    assert isinstance(parsed.output_parsed, Purchase)
    tool: Any = openai.pydantic_function_tool(Weather, name="weather")["function"] | {"type": "function"}
    called = client.responses.parse(
        model=NAME, input=QUESTION, temperature=0, tools=[tool], tool_choice="required", parallel_tool_calls=False
    )
    (call,) = called.output
    assert call.type == "function_call"
    Weather.model_validate(call.parsed_arguments)
    told: Any = [
        *USER,
        call.model_dump(exclude={"parsed_arguments"}, exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
    ]
    assert client.responses.create(model=NAME, input=told, tools=[tool], max_output_tokens=16).output_text


def test_openai_gets_embeddings(client: openai.OpenAI) -> None:
    packed = client.embeddings.create(model=NAME, input=[QUESTION, "a"])
    plain = client.embeddings.create(model=NAME, input=QUESTION, encoding_format="float")
    assert packed.data[0].embedding == pytest.approx(plain.data[0].embedding, abs=1e-5)
    assert packed.data[1].embedding != packed.data[0].embedding


def test_openai_runs_a_batch_to_its_output_file(client: openai.OpenAI, solution: str) -> None:
    line = json.dumps(LINE | {"body": {"model": NAME, "messages": USER, "temperature": 0}})
    file = client.files.create(file=("in.jsonl", line.encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    deadline = time.monotonic() + PATIENCE
    while (batch := client.batches.retrieve(batch.id)).status != "completed":
        assert batch.status in ("validating", "in_progress", "finalizing"), batch.errors
        assert time.monotonic() < deadline, batch.status
        time.sleep(0.05)
    assert batch.output_file_id is not None
    (answer,) = map(json.loads, client.files.content(batch.output_file_id).text.splitlines())
    assert answer["custom_id"] == "one"
    assert answer["response"]["body"]["choices"][0]["message"]["content"] == solution


def test_lm_eval_scores_choices_and_answers(url: str, directory: Path) -> None:
    found = run_client("lm_eval", url, str(directory / "lm_eval"))
    plain, chat, remote = found["completions"], found["chats"], found["remote"]
    assert remote["results"] == plain["results"]
    assert plain["results"][CHOICE]["acc,none"] == 1
    assert plain["results"][PLAIN]["exact_match,result"] == chat["results"][CHAT]["exact_match,result"] == 1
    for chosen, answered in zip(plain["samples"][CHOICE], plain["samples"][PLAIN], strict=True):
        document = chosen["doc"]
        ((text,),) = answered["resps"]
        # Only the text that the model generates greedily is its most likely continuation.
        greedy = [greedy for _, greedy in chosen["filtered_resps"]]
        assert greedy == [text == f" {choice}" for choice in document["choices"]]
    assert sum(any(greedy for _, greedy in one["filtered_resps"]) for one in plain["samples"][CHOICE]) == DOCUMENTS


def test_langchain_chats_streams_calls_tools_and_parses(url: str, solution: str) -> None:
    from langchain_core.exceptions import ContextOverflowError
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=NAME, base_url=f"{url}/v1", api_key="none", temperature=0, max_retries=0, timeout=240)  # type: ignore[arg-type,unused-ignore]
    answer = model.invoke(QUESTION)
    assert answer.content == solution
    assert answer.usage_metadata["output_tokens"] > 0
    parts = list(model.stream(QUESTION))
    assert len(parts) > 2
    assert "".join(part.content for part in parts) == solution

    async def asked() -> str:
        try:
            return str((await model.ainvoke(QUESTION)).content)
        finally:
            await model.root_async_client.close()

    assert asyncio.run(asked()) == solution
    called = model.bind_tools([Weather], tool_choice="Weather", parallel_tool_calls=False).invoke(QUESTION)
    (call,) = called.tool_calls
    assert (call["name"], set(call["args"])) == ("Weather", {"city"})
    for method in ("json_schema", "function_calling"):
        assert isinstance(model.with_structured_output(Purchase, method=method).invoke(QUESTION), Purchase)
    with pytest.raises(ContextOverflowError):
        model.invoke(QUESTION * 100)


def test_litellm_completes_streams_parses_calls_and_embeds(url: str, solution: str) -> None:
    schema = {"name": "purchase", "strict": True, "schema": to_strict_json_schema(Purchase)}
    asked = {"question": QUESTION, "format": {"type": "json_schema", "json_schema": schema}, "tool": WEATHER}
    found = run_client("litellm", url, given=json.dumps(asked))
    assert found["whole"] == found["later"] == "".join(found["parts"]) == solution
    assert found["tokens"] > 0
    assert len(found["parts"]) > 2
    Purchase.model_validate_json(found["structured"])
    called, streamed = found["calls"]
    assert called == streamed
    assert called["name"] == "weather"
    Weather.model_validate_json(called["arguments"])
    assert found["after"]
    assert found["text"]
    assert [len(vector) for vector in found["vectors"]] == [192, 192]
    assert found["refused"].startswith("ContextWindowExceededError")
