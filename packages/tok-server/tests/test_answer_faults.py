"""An exception while an answer is written fails that request alone: others are answered and nothing stays open."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support.patience import wait_until
from support.serving import Server
from tok_core.text.detokenise import Detokeniser
from tok_server.openai.chat.serializer import ChatSerializer
from tok_server.openai.completions.serializer import CompletionSerializer

GUILTY_TOKENS = 13
MESSAGES = [{"role": "user", "content": "one"}]


class Fault(Exception):
    """The error that a test injects."""


def break_serializer(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """Make method `name` of a serializer raise for requests of GUILTY_TOKENS tokens."""
    right = getattr(owner, name)

    def wrong(self: Any, *arguments: Any) -> Any:
        if self._job.params.max_tokens == GUILTY_TOKENS:
            raise Fault("it has no JSON")
        return right(self, *arguments)

    monkeypatch.setattr(owner, name, wrong)


def ask(server: Server, serializer: type, *, max_tokens: int, stream: bool, **fields: object) -> Any:
    fields |= {"max_tokens": max_tokens, "stream": stream, "ignore_eos": True}
    if serializer is ChatSerializer:
        return server.chat(messages=MESSAGES, **fields)
    return server.complete(prompt="one", **fields)


@pytest.mark.parametrize("serializer", [CompletionSerializer, ChatSerializer])
@pytest.mark.parametrize(
    ("name", "stream"), [("encode_answer", False), ("encode_delta", True), ("encode_closing", True)]
)
def test_exception_while_writing_an_answer_fails_only_that_request(
    server: Server, serializer: type, name: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_serializer(monkeypatch, serializer, name)
    options = {"stream_options": {"include_usage": True}} if stream else {}
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(ask, server, serializer, max_tokens=12, stream=stream, **options) for _ in range(3)]
        guilty = pool.submit(ask, server, serializer, max_tokens=GUILTY_TOKENS, stream=stream, **options).result()
        answers = [one.result() for one in others]
    if stream:
        assert guilty.status == 200  # the stream had begun
        assert '"code":"internal_error"' in guilty.events()[-1]
    else:
        assert (guilty.status, guilty.error()["code"]) == (500, "internal_error")
    assert "it has no JSON" not in guilty.body.decode()
    assert [one.status for one in answers] == [200] * 3
    wait_until(lambda: server.engine.open_requests == 0)
    assert server.engine.health().ok
    assert server.engine.stats()["restarts"] == 0


def test_detokenizer_exception_ends_the_stream_with_an_error(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: Detokeniser, ids: list[int]) -> str:
        raise Fault("it has no text")

    with monkeypatch.context() as patch:
        patch.setattr(Detokeniser, "push", wrong)
        answer = ask(server, CompletionSerializer, max_tokens=5, stream=True)
    assert '"code":"request_failed"' in answer.events()[-1]
    wait_until(lambda: server.engine.open_requests == 0)
    assert ask(server, CompletionSerializer, max_tokens=5, stream=True).status == 200
    assert server.engine.stats()["restarts"] == 0
