"""The small endpoints /tokenize, /detokenize, /ready and /version, and formats detected from templates."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest

from support.serving import NAME, Server
from tok_core.text.template import ChatTemplate
from tok_server.openai.chat.prompt import tool_call_format, writes_reasoning
from tok_server.parsing.message_reader import CallFormat
from tok_server.settings import Formats

TEXT = "the quick brown fox, naïve 日本"
USER = [{"role": "user", "content": "hi"}]


def tokenise(server: Server, **fields: object) -> dict[str, Any]:
    answer = server.call("POST", "/tokenize", {"model": NAME, **fields})
    assert answer.status == 200, answer.body
    return answer.json()


def test_tokenize_and_detokenize_round_trip_text(server: Server) -> None:
    tokenizer = server.engine.tokenizer
    assert tokenizer is not None
    found = tokenise(server, prompt=TEXT)
    assert found["tokens"] == tokenizer.encode(TEXT)
    assert found["count"] == len(found["tokens"])
    assert found["max_model_len"] == server.engine.info.max_model_len
    assert found["token_strs"] is None
    bare = tokenise(server, prompt=TEXT, add_special_tokens=False, return_token_strs=True)
    assert bare["tokens"] == found["tokens"][1:]
    assert bare["token_strs"][:2] == [tokenizer.piece(token).decode() for token in bare["tokens"][:2]]
    assert server.call("POST", "/detokenize", {"tokens": bare["tokens"]}).json() == {"prompt": TEXT}
    begin = tokenizer.piece(found["tokens"][0]).decode()
    assert server.call("POST", "/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": begin + TEXT}


def test_tokenize_of_a_chat_counts_the_tokens_of_its_prompt(server: Server) -> None:
    used: Any = server.chat(messages=USER, max_tokens=1).json()["usage"]
    found = tokenise(server, messages=USER)
    assert found["count"] == used["prompt_tokens"]
    assert tokenise(server, messages=USER, add_generation_prompt=False)["count"] < found["count"]
    assert tokenise(server, messages=USER, add_special_tokens=True)["count"] == found["count"] + 1


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": USER}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": 1}, 400, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, 400, "prompt"),
        ("/tokenize", {"prompt": "a" * 200_000}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"messages": USER, "tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, 400, "tokens[1]"),
        ("/detokenize", {"tokens": [512]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [10**30]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [1] * 40_000}, 400, "tokens"),
    ],
)
def test_invalid_tokenize_and_detokenize_requests_are_refused(
    server: Server, path: str, body: Any, status: int, param: str
) -> None:
    answer = server.call("POST", path, body)
    assert answer.status == status, answer.body
    assert answer.error()["param"] in (param, None if body == {"prompt": "\ud800"} else param)


def test_ready_is_200_only_while_requests_are_accepted(server: Server) -> None:
    answer = server.call("GET", "/ready")
    assert (answer.status, answer.json()) == (200, {"ready": True, "status": "ready"})
    server.context.draining = True
    try:
        answer = server.call("GET", "/ready")
        assert (answer.status, answer.json()) == (503, {"ready": False, "status": "draining"})
    finally:
        server.context.draining = False
    server.context.ready = False
    try:
        answer = server.call("GET", "/ready")
        assert (answer.status, answer.json()) == (503, {"ready": False, "status": "starting"})
    finally:
        server.context.ready = True


def test_version_endpoint_returns_the_package_version(server: Server) -> None:
    assert server.call("GET", "/version").json() == {"version": version("tok-server")}


@pytest.mark.parametrize(
    ("source", "calls", "reasons"),
    [
        ("{{ messages }}", None, False),
        ("{% if tools %}<tool_call>{% endif %}{{ messages }}", "hermes", False),
        ("{% if tools %}<tool_call>{% endif %}{{ m.split('</think>')[-1] }}", "hermes", True),
        ("{% if message.role == 'tool' %}ipython{% endif %}{{ tools }}", "llama3", False),
    ],
)
def test_tool_call_and_reasoning_formats_are_detected_in_chat_template(
    source: str, calls: CallFormat | None, reasons: bool
) -> None:
    template = ChatTemplate({"default": source}, {})
    assert tool_call_format(Formats(), template) == calls
    assert writes_reasoning(Formats(), template) is reasons
    assert tool_call_format(Formats("llama3", "none"), template) == "llama3"
    assert tool_call_format(Formats("none", "qwen3"), template) is None
    assert writes_reasoning(Formats("none", "qwen3"), template)
    assert not writes_reasoning(Formats("none", "none"), template)
