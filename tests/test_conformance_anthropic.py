"""Tests of Anthropic's own client, unmodified, against `tok serve` of the demo model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from support.conformance import NAME, served
from support.patience import PATIENCE
from support.serving import serving
from tok_client.types import known_fields
from tok_server.anthropic.endpoint import MESSAGES
from tok_server.anthropic.request_types import CountTokensRequest, MessagesRequest
from tok_server.demo import MODEL_DIR

QUESTION = "Tom buys 4 books for 12 dollars each and 3 pens for 5 dollars each. How much does he spend in all?"
USER: Any = [{"role": "user", "content": QUESTION}]
# Newer versions of the client have no argument for the temperature.
ASKED: Any = {"model": NAME, "max_tokens": 400, "messages": USER, "extra_body": {"temperature": 0}}
WEATHER: Any = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CALL: Any = {"tools": [WEATHER], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}


@cache
def anthropic() -> Any:
    """Import the client when it is first used: it takes 3 s, and every test process imports this file."""
    return import_module("anthropic")


class Purchase(BaseModel):
    """A purchase."""

    buyer: Literal["Tom", "Ann"]
    dear: bool


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("anthropic")) as address:
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    with anthropic().Anthropic(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE) as one:
        yield one


@pytest.fixture(scope="module")
def solution(client: Any) -> str:
    """The model's answer to the question."""
    message = client.messages.create(**ASKED)
    assert message.stop_reason == "end_turn"
    (block,) = message.content
    assert block.text.endswith("#### 63")
    return str(block.text)


def test_sync_and_async_clients_stream_the_whole_answer(client: Any, url: str, solution: str) -> None:
    with client.messages.stream(**ASKED) as stream:
        assert "".join(stream.text_stream) == solution
        final = stream.get_final_message()
    assert (final.content[0].text, final.stop_reason) == (solution, "end_turn")
    whole = client.messages.create(**ASKED)
    assert whole._request_id.startswith("req-")
    prompts = [one.usage.input_tokens + one.usage.cache_read_input_tokens for one in (final, whole)]
    assert prompts[0] == prompts[1] == client.messages.count_tokens(model=NAME, messages=USER).input_tokens
    assert final.usage.output_tokens == whole.usage.output_tokens
    events = list(client.messages.create(**ASKED, stream=True))
    assert (events[0].type, events[-1].type) == ("message_start", "message_stop")

    async def by_the_other() -> list[str]:
        async with anthropic().AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE) as other:
            async with other.messages.stream(**ASKED) as events:
                text = "".join([part async for part in events.text_stream])
            return [text, (await other.messages.create(**ASKED)).content[0].text]

    assert asyncio.run(by_the_other()) == [solution, solution]


def test_client_calls_a_tool_and_continues_with_its_result(client: Any) -> None:
    message = client.messages.create(**ASKED, **CALL)
    (call,) = message.content
    assert (message.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "weather")
    assert call.input["city"] in ("Paris", "Rome")
    with client.messages.stream(**ASKED, **CALL) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        (streamed,) = stream.get_final_message().content
    assert parts
    assert (streamed.name, streamed.input) == (call.name, call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    messages = [*USER, message.to_param(), {"role": "user", "content": [result]}]
    after = client.messages.create(model=NAME, max_tokens=5, messages=messages, tools=[WEATHER])
    assert after.content[0].text


def test_tool_runner_calls_the_function(client: Any) -> None:
    asked: list[str] = []

    @anthropic().beta_tool  # type: ignore[untyped-decorator,unused-ignore]
    def weather(city: Literal["Paris", "Rome"]) -> str:
        """Return the weather of a city."""
        asked.append(city)
        return "sunny"

    choice = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    fields = {**ASKED, "tools": [weather], "tool_choice": choice, "max_iterations": 2}
    messages = list(client.beta.messages.tool_runner(**fields))
    assert [message.stop_reason for message in messages] == ["tool_use", "tool_use"]
    assert set(asked) <= {"Paris", "Rome"}
    # Newer clients ask the server to store the conversation, and send all of it once the server refuses that.
    sizes = [message.usage.input_tokens + message.usage.cache_read_input_tokens for message in messages]
    assert sizes[1] > sizes[0] + 10


def test_client_parses_structured_outputs(client: Any) -> None:
    found = client.messages.parse(**ASKED, output_format=Purchase)
    assert isinstance(found.parsed_output, Purchase)
    with client.messages.stream(**ASKED, output_format=Purchase) as stream:
        assert stream.get_final_message().parsed_output == found.parsed_output


def test_stop_sequence_thinking_and_cache_control_are_taken(client: Any, solution: str) -> None:
    message = client.messages.create(**ASKED, stop_sequences=["####"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "####")
    assert message.content[0].text == solution.partition("####")[0]
    text = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    raw = client.messages.with_raw_response.create(**ASKED, system=[text], thinking={"type": "adaptive"})
    assert raw.headers["x-tok-ignored"] == "thinking"
    assert raw.parse().content[0].text


def refusal(kind: type[Exception], ask: Callable[[], object]) -> Any:
    """Return the error of `ask`, which must be of exactly this class, with its request's id."""
    with pytest.raises(kind) as refused:
        ask()
    assert type(refused.value) is kind
    error: Any = refused.value
    assert error.request_id.startswith("req-")
    return error


def test_refusals_raise_the_clients_own_exceptions(client: Any) -> None:
    def ask(**fields: Any) -> Callable[[], object]:
        return lambda: client.messages.create(**{**ASKED, **fields})

    error = refusal(anthropic().BadRequestError, ask(messages=USER * 100))
    assert error.type == "invalid_request_error"
    assert "prompt is too long" in error.message
    assert "maximum context length is 1024 tokens" in error.message
    error = refusal(anthropic().BadRequestError, ask(tools=[{"type": "web_search_20250305", "name": "web_search"}]))
    assert "tools[0].type" in error.message
    assert refusal(anthropic().NotFoundError, ask(model="other")).type == "not_found_error"
    assert refusal(anthropic().BadRequestError, ask(stream=True, max_tokens=-1)).type == "invalid_request_error"


def test_every_field_of_the_client_is_honoured_or_refused() -> None:
    from anthropic.types import message_count_tokens_params, message_create_params

    refused = {name for table in MESSAGES for name in table.fields}
    in_headers = {"user_profile_id", "workspace_id"}
    listed = {"diagnostics", "speed"}  # in x-tok-ignored: they change no answer
    fields = message_create_params.MessageCreateParamsBase.__annotations__.keys() | {"stream"}
    assert fields - in_headers - listed <= known_fields(MessagesRequest) | refused
    counted = message_count_tokens_params.MessageCountTokensParams.__annotations__.keys()
    assert counted - in_headers - listed <= known_fields(CountTokensRequest) | refused


def test_limits_raise_the_clients_own_exceptions() -> None:
    with serving(MODEL_DIR, name=NAME, api_key="secret", max_body=2000, rate_limit_requests=3) as server:

        def ask(key: str, **fields: Any) -> Callable[[], object]:
            def create() -> object:
                address = f"http://127.0.0.1:{server.port}"
                with anthropic().Anthropic(base_url=address, api_key=key, max_retries=0, timeout=PATIENCE) as client:
                    return client.messages.create(**{**ASKED, "max_tokens": 1, **fields})

            return create

        assert refusal(anthropic().AuthenticationError, ask("wrong")).type == "authentication_error"
        large = refusal(anthropic().RequestTooLargeError, ask("secret", system="a" * 3000))
        assert large.status_code == 413
        ask("secret")()
        ask("secret")()
        assert refusal(anthropic().RateLimitError, ask("secret")).type == "rate_limit_error"
        server.context.draining = True
        error = refusal(anthropic().OverloadedError, ask("secret"))
        assert (error.status_code, error.type) == (529, "overloaded_error")
