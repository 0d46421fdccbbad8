"""A stop string ends an answer even if a hidden special token lies within the string."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from support.scripted_model import make_scripted_model
from support.serving import Server, serving
from support.tiny_tokenizer import SPECIAL_TOKENS

HIDDEN = SPECIAL_TOKENS[0]
SCRIPT = ["one ", "two S", "TO", HIDDEN, "P three", " four"]
SHOWN = "one two STOP three four"


@pytest.fixture(scope="module")
def scripted_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose answer to `recite` is the script."""
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    model = make_scripted_model(tmp_path_factory.mktemp("hidden") / "model", {"recite": SCRIPT}, template)
    with serving(model) as running:
        yield running


def ask(server: Server, *, chat: bool, stream: bool, **fields: object) -> tuple[str, str, int]:
    """Return the shown text, the finish reason and the number of completion tokens."""
    fields |= {"temperature": 0, "stream": stream}
    fields |= {"stream_options": {"include_usage": True}} if stream else {}
    if chat:
        answer = server.chat(messages=[{"role": "user", "content": "recite"}], **fields)
    else:
        answer = server.complete(prompt="recite", **fields)
    chunks: list[Any] = answer.chunks() if stream else [answer.json()]
    choices = list(itertools.chain.from_iterable(chunk["choices"] for chunk in chunks))
    if chat:
        texts = [choice["delta" if stream else "message"].get("content") or "" for choice in choices]
    else:
        texts = [choice["text"] for choice in choices]
    return "".join(texts), choices[-1]["finish_reason"], chunks[-1]["usage"]["completion_tokens"]


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_stop_string_around_a_hidden_token_ends_the_answer(scripted_server: Server, chat: bool, stream: bool) -> None:
    assert ask(scripted_server, chat=chat, stream=stream) == (SHOWN, "stop", len(SCRIPT) + 1)
    assert ask(scripted_server, chat=chat, stream=stream, stop="STOP") == ("one two ", "stop", 5)
    assert ask(scripted_server, chat=chat, stream=stream, stop=["unseen", "wo STOP th"]) == ("one t", "stop", 5)
    assert ask(scripted_server, chat=chat, stream=stream, stop="STOP four") == (SHOWN, "stop", len(SCRIPT) + 1)
