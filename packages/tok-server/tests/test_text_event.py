"""Stream events that contain only text equal events that are encoded in full."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tok_core import SamplingParams
from tok_core.outputs import Delta
from tok_server.openai.chat.serializer import ChatSerializer
from tok_server.openai.completions.serializer import CompletionSerializer
from tok_server.openai.generation.job import GenerationJob
from tok_server.openai.generation.serializer import TokenTexts

AnySerializer = CompletionSerializer | ChatSerializer
Chunk = dict[str, Any]  # JSON as it comes


def _serializer(
    kind: type[AnySerializer], model: str = "tiny", *, ids: bool = False, usage: bool = False
) -> AnySerializer:
    params = SamplingParams(n=3)
    job = GenerationJob(
        id="answer-1",
        created=1,
        model=model,
        prompts=[[1, 2]],
        params=params,
        stream=True,
        include_usage=usage,
        return_token_ids=ids,
    )
    return kind(job, TokenTexts(None))


def _chunks(data: bytes) -> list[Chunk]:
    *events, rest = data.split(b"\n\n")
    assert rest == b""
    return [msgspec.json.decode(event.removeprefix(b"data: ")) for event in events]


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("kind", [CompletionSerializer, ChatSerializer])
@given(texts=st.lists(st.text(), min_size=1, max_size=5), model=st.text(min_size=1))
def test_text_only_events_equal_full_events_without_token_ids(
    kind: type[AnySerializer], usage: bool, texts: list[str], model: str
) -> None:
    model = model.replace("\0", "")
    short, long = _serializer(kind, model, usage=usage), _serializer(kind, model, ids=True, usage=usage)
    for number, text in enumerate(texts):
        delta = Delta(number % 3, [7], text)
        told = [chunk for chunk in _chunks(long.encode_delta(0, delta)) if _without_ids(chunk)]
        # Tokens without text get an event only if token ids are returned.
        assert _chunks(short.encode_delta(0, delta)) == [one for one in told if text or _role(one)]
    end = Delta(0, [7], "end", None, "length")
    assert _chunks(short.encode_delta(0, end)) == [
        one for one in _chunks(long.encode_delta(0, end)) if _without_ids(one)
    ]


def _without_ids(chunk: Chunk) -> bool:
    """Remove the token ids from a chunk; return True, so that a filter can call it."""
    (choice,) = chunk["choices"]
    for part in (chunk, choice):
        part.pop("token_ids", None)
        part.pop("prompt_token_ids", None)
    return True


def _role(chunk: Chunk) -> bool:
    (choice,) = chunk["choices"]
    return "role" in choice.get("delta", {})


@pytest.mark.parametrize("kind", [CompletionSerializer, ChatSerializer])
def test_continuous_usage_is_updated_in_each_event(kind: type[AnySerializer]) -> None:
    job = GenerationJob(
        id="answer-1",
        created=1,
        model="tiny",
        prompts=[[1, 2]],
        params=SamplingParams(),
        stream=True,
        include_usage=True,
        return_token_ids=False,
        continuous_usage=True,
    )
    serializer = kind(job, TokenTexts(None))
    chunks = [_chunks(serializer.encode_delta(0, Delta(0, [7], "a")))[-1] for _ in range(3)]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3]
