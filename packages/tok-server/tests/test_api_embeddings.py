"""/v1/embeddings answers in OpenAI's shape with the vectors that transformers computes."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch

from support.serving import NAME, Answer, Server
from support.tiny_models import reference_model
from support.tolerance import near
from tok_server.openai.endpoints import ENDPOINTS, ServedModel

TEXTS = ["The quick brown fox", "jumps", "over the lazy dog and runs away"]


def embed(server: Server, **fields: object) -> Answer:
    return server.call("POST", "/v1/embeddings", {"model": NAME, **fields})


def ids_of(server: Server, text: str) -> list[int]:
    assert server.engine.tokenizer is not None
    return server.engine.tokenizer.encode(text)


def reference(tiny_model: Path, ids: list[int], pooling: str = "last", dimensions: int | None = None) -> np.ndarray:
    """Return the embedding of `ids` computed from transformers' hidden states."""
    with torch.inference_mode():
        states = reference_model(tiny_model).base_model(torch.tensor([ids])).last_hidden_state[0]
    pooled = (states[-1] if pooling == "last" else states.mean(0)).numpy()[:dimensions]
    found: np.ndarray = pooled / np.linalg.norm(pooled)
    return found


def vectors(answer: Answer) -> np.ndarray:
    """Return one row per input, from lists of floats or base64."""
    assert answer.status == 200, answer.body
    body: dict[str, Any] = answer.json()
    assert body.keys() == {"object", "data", "model", "usage"}
    assert (body["object"], body["model"]) == ("list", NAME)
    assert [(one["object"], one["index"]) for one in body["data"]] == [
        ("embedding", index) for index in range(len(body["data"]))
    ]
    found = [one["embedding"] for one in body["data"]]
    return np.array([np.frombuffer(base64.b64decode(one), "<f4") if isinstance(one, str) else one for one in found])


@pytest.mark.parametrize("pooling", [None, "last", "mean"])
@pytest.mark.parametrize("encoding_format", [None, "float", "base64"])
def test_embeddings_equal_transformers_in_either_encoding(
    server: Server, tiny_model: Path, pooling: str | None, encoding_format: str | None
) -> None:
    extras = {"pooling": pooling, "encoding_format": encoding_format, "user": "me"}
    found = vectors(embed(server, input=TEXTS, **extras))
    wanted = [reference(tiny_model, ids_of(server, text), pooling or "last") for text in TEXTS]
    np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_text_and_token_id_inputs_give_the_same_embeddings(server: Server, tiny_model: Path) -> None:
    ids = [ids_of(server, text) for text in TEXTS]
    wanted = [reference(tiny_model, one) for one in ids]
    np.testing.assert_allclose(vectors(embed(server, input=ids)), wanted, atol=1e-4)
    np.testing.assert_allclose(vectors(embed(server, input=ids[2])), wanted[2:], atol=1e-4)
    answer = embed(server, input=TEXTS[2])
    np.testing.assert_allclose(vectors(answer), wanted[2:], atol=1e-4)
    assert answer.json()["usage"] == {"prompt_tokens": len(ids[2]), "total_tokens": len(ids[2])}


def test_dimensions_truncates_and_renormalizes_the_embedding(server: Server, tiny_model: Path) -> None:
    found = vectors(embed(server, input=TEXTS[0], dimensions=10))
    np.testing.assert_allclose(found[0], reference(tiny_model, ids_of(server, TEXTS[0]), dimensions=10), atol=1e-4)


def test_2048_inputs_are_embedded_in_order(server: Server, tiny_model: Path) -> None:
    inputs = [[1 + index % 300, 5] for index in range(2048)]
    found = vectors(embed(server, input=inputs, encoding_format="base64"))
    assert found.shape == (2048, 64)
    np.testing.assert_array_equal(found[:300].argmax(axis=1), found[300:600].argmax(axis=1))
    for index in (0, 777, 2047):
        np.testing.assert_allclose(found[index], reference(tiny_model, inputs[index]), atol=1e-4)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", [1]]}, "input"),
        ({"input": [[1]] * 2049}, "input"),
        ({"input": [[1], []]}, "input[1]"),
        ({"input": [[1], [99_999]]}, "input[1]"),
        ({"input": [99_999]}, "input"),
        ({"input": [1] * 2000}, "input"),
        ({"input": [1], "dimensions": 65}, "dimensions"),
        ({"input": [1], "dimensions": 0}, "dimensions"),
        ({"input": [1], "encoding_format": "hex"}, "encoding_format"),
        ({"input": [1], "pooling": "cls"}, "pooling"),
    ],
)
def test_invalid_embedding_request_gets_400_naming_the_field(
    server: Server, fields: dict[str, object], param: str
) -> None:
    answer = embed(server, **fields)
    assert answer.status == 400
    assert answer.error()["param"] == param


def test_unknown_model_gets_404_and_unknown_fields_are_listed(server: Server) -> None:
    assert server.call("POST", "/v1/embeddings", {"model": "other", "input": [1]}).status == 404
    assert embed(server, input=[1], zeta=1).headers["x-tok-ignored"] == "zeta"


@pytest.mark.parametrize("encoding_format", [openai.omit, "float"])
def test_openai_client_reads_the_embeddings(server: Server, tiny_model: Path, encoding_format: Any) -> None:
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        found = client.embeddings.create(model=NAME, input=TEXTS, dimensions=32, encoding_format=encoding_format)
    wanted = [reference(tiny_model, ids_of(server, text), dimensions=32) for text in TEXTS]
    np.testing.assert_allclose([one.embedding for one in found.data], wanted, atol=1e-4)
    assert found.usage.prompt_tokens == sum(len(ids_of(server, text)) for text in TEXTS)


def test_batch_line_gives_the_same_embeddings_as_the_request(server: Server) -> None:
    body = json.dumps({"model": NAME, "input": TEXTS, "pooling": "mean"}).encode()
    asked = ENDPOINTS["/v1/embeddings"](body, ServedModel(server.engine, (NAME,), server.context.settings.formats))
    assert asked.samples == len(TEXTS)
    write = asyncio.run(asked.compute())
    assert near(json.loads(write()), embed(server, input=TEXTS, pooling="mean").json(), 1e-5)
