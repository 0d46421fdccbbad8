"""Sampling parameters that a request omits come from the model's generation_config.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.serving import Server, serving
from support.tiny_models import make_model

PROMPT = {"prompt": "the quick brown", "n": 4, "max_tokens": 12, "seed": 1}
USER = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "seed": 1}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path: Path = make_model("llama", tmp_path_factory.mktemp("defaults") / "model")
    file = path / "generation_config.json"
    # The temperature makes every sample different, unless top_k leaves only the most likely token.
    file.write_text(json.dumps({**json.loads(file.read_text()), "temperature": 50.0, "top_k": 1}))
    with serving(path) as one:
        yield one


def texts(server: Server, **fields: object) -> set[str]:
    answer = server.complete(**{**PROMPT, **fields})
    assert answer.status == 200, answer.body
    found: Any = answer.json()
    return {choice["text"] for choice in found["choices"]}


def test_completions_use_generation_config_for_missing_or_null_fields(server: Server) -> None:
    likeliest = texts(server, temperature=0)
    assert len(likeliest) == 1
    assert texts(server) == texts(server, top_k=None) == texts(server, temperature=1.0) == likeliest
    assert len(texts(server, top_k=0)) == 4


def test_chats_and_responses_use_generation_config_defaults(server: Server) -> None:
    def content(**fields: object) -> str:
        answer: Any = server.chat(**USER, **fields).json()
        return str(answer["choices"][0]["message"]["content"])

    assert content() == content(temperature=0) != content(top_k=0)
    response = server.call("POST", "/v1/responses", {"input": "hi", "max_output_tokens": 4}).json()
    assert (response["temperature"], response["top_p"]) == (50.0, 1.0)
