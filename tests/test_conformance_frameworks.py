"""Tests of unmodified frameworks against `tok serve` of the demo model.

instructor, outlines, OpenAI's Agents SDK, pydantic-ai and DSPy; TRL's client of a generation server.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from support.conformance import NAME, served
from support.patience import PATIENCE

QUESTION = "Tom buys 4 books for 12 dollars each and 3 pens for 5 dollars each. How much does he spend in all?"
USER: Any = [{"role": "user", "content": QUESTION}]
GREEDY: Any = {"model": NAME, "messages": USER, "temperature": 0}

# Libraries under test warn about themselves, and about Python versions.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


class Purchase(BaseModel):
    """A purchase."""

    buyer: Literal["Tom", "Ann"]
    thing: Literal["books", "pens"]
    dear: bool


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server's address, without /v1."""
    with served(tmp_path_factory.mktemp("frameworks")) as address:
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as one:
        yield one


@pytest.fixture
async def async_client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as one:
        yield one


@pytest.fixture(scope="module")
def solution(client: openai.OpenAI) -> str:
    """The model's answer to the question."""
    found: str = client.chat.completions.create(**GREEDY).choices[0].message.content
    assert found.endswith("#### 63")
    return found


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_instructor_parses_an_answer_whole_and_in_parts(client: openai.OpenAI, mode: str) -> None:
    import instructor

    patched: Any = instructor.from_openai(client, mode=instructor.Mode[mode])
    asked = GREEDY | {"response_model": Purchase, "max_retries": 0, "max_tokens": 100}
    assert isinstance(patched.chat.completions.create(**asked), Purchase)
    *_, last = patched.chat.completions.create_partial(**asked)
    # Instructor describes a partial answer in other words, which the model reads: compare answers to the same prompt.
    whole = patched.chat.completions.create(**asked | {"response_model": instructor.Partial[Purchase]})
    assert last.model_dump() == whole.model_dump()
    Purchase.model_validate(last.model_dump())


def test_outlines_constrains_answers_by_the_fields_of_vllm(client: openai.OpenAI, solution: str) -> None:
    import outlines
    from outlines.types import regex

    ask: Any = outlines.from_vllm(client, NAME)
    settings: Any = {"max_tokens": 60, "temperature": 0}
    assert ask(QUESTION, **settings) == solution
    Purchase.model_validate_json(ask(QUESTION, Purchase, **settings))
    assert ask(QUESTION, Literal["yes", "no"], **settings) in ("yes", "no")
    assert int(ask(QUESTION, int, **settings)) >= 0
    digits = regex("[0-9]{3}")
    whole = ask(QUESTION, digits, **settings)
    assert (len(whole), whole.isdigit()) == (3, True)
    assert "".join(ask.stream(QUESTION, digits, **settings)) == whole


def test_outlines_takes_a_schema_by_the_field_of_openai(client: openai.OpenAI) -> None:
    import outlines

    ask: Any = outlines.from_openai(client, NAME)
    Purchase.model_validate_json(ask(QUESTION, Purchase, max_tokens=60, temperature=0))


def test_outlines_constrains_an_answer_by_a_lark_grammar(client: openai.OpenAI) -> None:
    import outlines
    from outlines.types import CFG

    ask: Any = outlines.from_vllm(client, NAME)
    grammar = CFG('start: sum\nsum: NUMBER "+" NUMBER\nNUMBER: /[0-9]{1,2}/\n')
    assert re.fullmatch(r"[0-9]{1,2}\+[0-9]{1,2}", ask(QUESTION, grammar, max_tokens=60, temperature=0))


@pytest.mark.parametrize("endpoint", ["ChatCompletions", "Responses"])
async def test_agents_sdk_runs_agents_whole_and_streamed(
    async_client: openai.AsyncOpenAI, solution: str, endpoint: str
) -> None:
    import agents

    agents.set_tracing_disabled(True)
    model = getattr(agents, f"OpenAI{endpoint}Model")(model=NAME, openai_client=async_client)
    cities: list[str] = []

    def weather(city: Literal["Paris", "Rome"]) -> str:
        """The weather of a city."""
        cities.append(city)
        return "sunny"

    tool = agents.function_tool(weather)

    def agent(**more: Any) -> agents.Agent[Any]:
        choice = "required" if "tools" in more else None
        settings = agents.ModelSettings(temperature=0, max_tokens=100, tool_choice=choice, parallel_tool_calls=False)
        return agents.Agent(name="helper", model=model, model_settings=settings, **more)

    plain = await agents.Runner.run(agent(), QUESTION)
    assert plain.final_output == solution
    assert plain.context_wrapper.usage.output_tokens > 0
    streamed = agents.Runner.run_streamed(agent(), QUESTION)
    raw = [event.data async for event in streamed.stream_events() if event.type == "raw_response_event"]
    deltas = [event.delta for event in raw if event.type == "response.output_text.delta"]
    assert len(deltas) > 2
    assert "".join(deltas) == streamed.final_output == solution
    typed = await agents.Runner.run(agent(output_type=Purchase), QUESTION)
    assert isinstance(typed.final_output, Purchase)

    # The tool's result goes back to the model, unless the agent stops at it.
    answered = await agents.Runner.run(agent(tools=[tool]), QUESTION)
    kinds = [item.type for item in answered.new_items]
    assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"]
    stopping = agent(tools=[tool], tool_use_behavior="stop_on_first_tool")
    calling = agents.Runner.run_streamed(stopping, QUESTION)
    named = [event.name async for event in calling.stream_events() if event.type == "run_item_stream_event"]
    assert named == ["tool_called", "tool_output"]
    assert calling.final_output == "sunny"
    assert len(cities) == 2


@pytest.mark.parametrize("endpoint", ["Chat", "Responses"])
async def test_pydantic_ai_runs_agents_whole_and_streamed(
    async_client: openai.AsyncOpenAI, solution: str, endpoint: str
) -> None:
    import pydantic_ai
    from pydantic_ai.models import openai as models
    from pydantic_ai.providers.openai import OpenAIProvider

    model = getattr(models, f"OpenAI{endpoint}Model")(NAME, provider=OpenAIProvider(openai_client=async_client))
    settings: Any = {"temperature": 0, "max_tokens": 100, "parallel_tool_calls": False}

    def agent(output_type: Any = str) -> pydantic_ai.Agent[None, Any]:
        return pydantic_ai.Agent(model, model_settings=settings, retries=0, output_type=output_type)

    plain = await agent().run(QUESTION)
    assert plain.output == solution
    assert plain.usage.output_tokens > 0
    async with agent().run_stream(QUESTION) as stream:
        assert [part async for part in stream.stream_output()][-1] == solution
    for kind in (pydantic_ai.ToolOutput, pydantic_ai.NativeOutput):
        assert isinstance((await agent(kind(Purchase)).run(QUESTION)).output, Purchase)
        async with agent(kind(Purchase)).run_stream(QUESTION) as stream:
            assert isinstance(await stream.get_output(), Purchase)


@pytest.mark.parametrize("endpoint", ["chat", "responses"])
def test_dspy_gets_text_objects_and_several_choices(
    url: str, solution: str, endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSPY_CACHEDIR", str(tmp_path))
    import dspy

    lm = dspy.LM(
        f"openai/{NAME}", api_base=f"{url}/v1", api_key="none", model_type=endpoint, cache=False, num_retries=0
    )

    def texts(**more: Any) -> list[str]:
        return [one["text"] if isinstance(one, dict) else one for one in lm(QUESTION, max_tokens=100, **more)]

    assert texts(temperature=0) == [solution]
    assert lm.history[-1]["usage"]["completion_tokens"] > 0
    Purchase.model_validate_json(texts(temperature=0, response_format=Purchase)[0])
    assert len(texts(temperature=1, n=3)) == 3
    with pytest.raises(dspy.ContextWindowExceededError, match="maximum context length is 1024 tokens"):
        lm("apples " * 1024)


def test_trl_generates_chats_and_scores_sequences(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from trl.generation import vllm_client

    # The class asks for an installed vLLM, of which only updates of weights use anything.
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda *_: True)
    trl = vllm_client.VLLMClient(base_url=url)
    with trl.session:
        prompts, whole_length = [f"Question: {QUESTION}\nAnswer:", "Question:"], {"ignore_eos": True}
        texts = trl.generate(prompts, n=2, max_tokens=5, generation_kwargs=whole_length)
        assert [len(ids) for ids in texts["completion_ids"]] == [5] * 4
        assert [len(logprobs) for logprobs in texts["logprobs"]] == [5] * 4
        assert texts["logprob_token_ids"] == [[[token] for token in ids] for ids in texts["completion_ids"]]
        # As in GRPO: prompts as ids, the most likely tokens beside each sampled one, an answer of a given form.
        ids = trl.generate(texts["prompt_ids"], max_tokens=5, top_k=50, logprobs=2, structured_outputs_regex="[0-9]{3}")
        assert ids["prompt_ids"] == texts["prompt_ids"]
        assert all(len(top) >= 2 for logprobs in ids["logprobs"] for top in logprobs)
        tools = [{"type": "function", "function": {"name": "time"}}]
        chats = trl.chat([USER, USER], n=2, max_tokens=5, tools=tools, generation_kwargs=whole_length)
        assert len(chats["prompt_ids"]) == 2
        assert [len(one) for one in chats["completion_ids"]] == [5] * 4
        # A teacher's log-probabilities of given sequences.
        whole = [prompt + answer for prompt, answer in zip(ids["prompt_ids"], ids["completion_ids"], strict=True)]
        lengths = [len(prompt) for prompt in ids["prompt_ids"]]
        teacher = trl.get_sequence_logprobs(whole, lengths, top_logprobs=100)
    for sequence, length, top, actual in zip(
        whole, lengths, teacher["logprobs"], teacher["actual_token_ids"], strict=True
    ):
        assert [len(one) for one in top] == [100] * (len(sequence) - length)
        assert actual == [[token] for token in sequence[length:]]
