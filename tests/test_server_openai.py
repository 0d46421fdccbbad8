"""Tests with the `openai` package as client: sync, async and streamed objects are valid."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion import Completion
from pydantic import BaseModel

from support.serving import NAME, Server, serving
from support.tiny_models import make_model

MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "the quick fox"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = make_model("llama", tmp_path_factory.mktemp("openai") / "tiny")
    with serving(model, api_key="key") as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key="key", max_retries=0) as found:
        yield found


def check_valid(found: BaseModel) -> None:
    """Validate an object strictly, since the package builds its objects without validation."""
    type(found).model_validate(found.model_dump(exclude_unset=True), strict=True)


def check_valid_chunk(chunk: Completion) -> None:
    """Validate a chunk. Its finish reason may be null, as in OpenAI's streams, which the package's type forbids."""
    fields = chunk.model_dump(exclude_unset=True)
    for choice in fields["choices"]:
        choice["finish_reason"] = choice["finish_reason"] or "stop"
    Completion.model_validate(fields, strict=True)


def test_a_completion_is_valid(client: openai.OpenAI) -> None:
    found = client.completions.create(
        model=NAME, prompt=["one", "two"], n=2, max_tokens=6, logprobs=2, temperature=0.8, seed=1, stop="zzz"
    )
    assert isinstance(found, Completion)
    check_valid(found)
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert found.object == "text_completion"
    assert found.usage is not None
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens
    assert all(choice.logprobs is not None for choice in found.choices)
    assert found._request_id


def test_a_streamed_completion_is_valid_and_equals_the_whole_one(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=NAME, prompt="one", max_tokens=30, temperature=0)
    parts = []
    with client.completions.create(
        model=NAME,
        prompt="one",
        max_tokens=30,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ) as chunks:
        for chunk in chunks:
            check_valid_chunk(chunk)
            parts.append(chunk)
    assert "".join(part.choices[0].text for part in parts[:-1]) == whole.choices[0].text
    assert parts[-1].choices == []
    assert parts[-1].usage is not None
    assert whole.usage is not None
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_chat_completion_is_valid(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(
        model=NAME, messages=MESSAGES, n=2, max_completion_tokens=6, logprobs=True, top_logprobs=3, seed=3
    )
    assert isinstance(found, ChatCompletion)
    check_valid(found)
    assert [choice.index for choice in found.choices] == [0, 1]
    for choice in found.choices:
        assert choice.message.role == "assistant"
        assert choice.message.content is not None
        assert choice.logprobs is not None
        assert choice.logprobs.content
    again: list[openai.types.chat.ChatCompletionMessageParam] = [
        *MESSAGES,
        {"role": "assistant", "content": found.choices[0].message.content},
        {"role": "user", "content": "and then?"},
    ]
    check_valid(client.chat.completions.create(model=NAME, messages=again, max_tokens=3))


def test_a_received_chat_message_can_be_sent_back(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=4)
    sent: list[object] = [*MESSAGES, first.choices[0].message, *MESSAGES]
    check_valid(client.chat.completions.create(model=NAME, messages=sent, max_tokens=4))  # type: ignore[arg-type]


def test_a_streamed_chat_is_valid_and_equals_the_whole_one(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=30, temperature=0)
    text, reasons = "", []
    with client.chat.completions.create(
        model=NAME, messages=MESSAGES, max_tokens=30, temperature=0, stream=True
    ) as chunks:
        for chunk in chunks:
            assert isinstance(chunk, ChatCompletionChunk)
            check_valid(chunk)
            text += chunk.choices[0].delta.content or ""
            reasons.append(chunk.choices[0].finish_reason)
    assert text == whole.choices[0].message.content
    assert reasons[-1] == whole.choices[0].finish_reason
    assert set(reasons[:-1]) == {None}


def test_the_openai_stream_helper_accumulates_the_whole_chat(server: Server, client: openai.OpenAI) -> None:
    # The helper requires answers that end by themselves: after ten tokens an EOS token is nearly certain.
    ends = {str(token): 100 for token in server.engine.info.eos_token_ids}
    more = {"min_tokens": 10}
    with client.chat.completions.stream(
        model=NAME, messages=MESSAGES, n=2, seed=1, logprobs=True, logit_bias=ends, extra_body=more
    ) as stream:
        found = stream.get_final_completion()
    whole = client.chat.completions.create(
        model=NAME, messages=MESSAGES, n=2, seed=1, logprobs=True, logit_bias=ends, extra_body=more
    )
    assert [choice.finish_reason for choice in found.choices] == ["stop", "stop"]
    assert [choice.message.content for choice in found.choices] == [choice.message.content for choice in whole.choices]


async def test_the_async_openai_client_gets_the_same_answers(server: Server, client: openai.OpenAI) -> None:
    expected = client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=12, temperature=0)
    async with openai.AsyncOpenAI(base_url=server.url, api_key="key", max_retries=0) as found:
        whole = await found.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=12, temperature=0)
        check_valid(whole)
        text = ""
        stream = await found.chat.completions.create(
            model=NAME, messages=MESSAGES, max_tokens=12, temperature=0, stream=True
        )
        async for chunk in stream:
            check_valid(chunk)
            text += chunk.choices[0].delta.content or ""
        completed = await found.completions.create(model=NAME, prompt=[1, 2, 3], max_tokens=4)
        check_valid(completed)
    assert text == whole.choices[0].message.content == expected.choices[0].message.content


def test_models_are_listed(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    check_valid(model)
    assert client.models.retrieve(NAME) == model


def test_errors_raise_the_exceptions_of_the_openai_package(server: Server, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=NAME, prompt="one", max_tokens=0)
    assert bad.value.param == "max_tokens"
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="one")
    assert missing.value.code == "model_not_found"
    with (
        openai.OpenAI(base_url=server.url, api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_extra_body_carries_extension_parameters(client: openai.OpenAI) -> None:
    found = client.completions.create(
        model=NAME,
        prompt="one",
        max_tokens=5,
        extra_body={"ignore_eos": True, "top_k": 1, "return_token_ids": True},
    )
    ids = found.choices[0].model_dump()["token_ids"]
    assert len(ids) == 5
