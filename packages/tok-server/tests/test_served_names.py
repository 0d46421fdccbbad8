"""A model with several names: requests may use any of them, answers show the first."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.serving import Server, serving
from tok_core import InvalidField
from tok_server import Settings
from tok_server.openai import ENDPOINTS, ServedModel

NAMES = ["first", "owner/second"]


@pytest.fixture(scope="module")
def named(tiny_model: Path) -> Iterator[Server]:
    with serving(tiny_model, name=NAMES[0], model_aliases=(NAMES[1],)) as running:
        yield running


@pytest.mark.parametrize("name", [*NAMES, None])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 1}),
        ("/v1/embeddings", {"input": "a"}),
    ],
)
def test_requests_may_use_any_name_and_answers_show_the_first(
    named: Server, path: str, body: dict[str, object], name: str | None
) -> None:
    answer = named.call("POST", path, {**body, "model": name})
    assert answer.status == 200, answer.body
    assert answer.json()["model"] == NAMES[0]


def test_unknown_name_gets_404_with_all_names(named: Server) -> None:
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/tokenize", {"prompt": "a"}), ("/v1/embeddings", {})):
        answer = named.call("POST", path, {"input": "a", **body, "model": "second"})
        assert answer.status == 404
        assert answer.error()["message"] == "model is 'second'; allowed: 'first', 'owner/second'"


def test_models_lists_every_name_first_one_first(named: Server) -> None:
    found: Any = named.call("GET", "/v1/models").json()["data"]
    assert [one["id"] for one in found] == NAMES
    for name in NAMES:
        assert named.call("GET", f"/v1/models/{name}").json()["id"] == name
    assert named.call("GET", "/v1/models/second").status == 404


def test_batch_lines_may_use_any_name(named: Server) -> None:
    served = ServedModel(named.engine, named.context.settings.model_names, named.context.settings.formats)
    body = json.dumps({"model": NAMES[1], "prompt": "a", "max_tokens": 1}).encode()
    assert ENDPOINTS["/v1/completions"](body, served).samples == 1


def test_empty_name_is_refused() -> None:
    with pytest.raises(InvalidField, match="served_model_name is ''"):
        Settings(model_name="a", model_aliases=("",))
