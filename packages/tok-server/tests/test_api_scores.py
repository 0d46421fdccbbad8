"""/pooling, /score and /rerank answer in vLLM's shapes with similarities of the vectors of /v1/embeddings."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from support.serving import NAME, Server

QUERY = "The quick brown fox"
DOCUMENTS = ["jumps", "over the lazy dog and runs away", QUERY, "jumps"]


def vectors(server: Server, texts: list[str], **fields: object) -> np.ndarray:
    data: Any = server.call("POST", "/v1/embeddings", {"input": texts, **fields}).json()["data"]
    return np.array([one["embedding"] for one in data])


def tokens(server: Server, texts: list[str]) -> int:
    assert server.engine.tokenizer is not None
    return sum(map(len, server.engine.tokenizer.encode_batch(texts)))


def post(server: Server, path: str, **fields: object) -> dict[str, Any]:
    answer = server.call("POST", path, fields)
    assert answer.status == 200, answer.body
    assert "x-tok-ignored" not in answer.headers
    return answer.json()


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize("pooling", [None, "mean"])
def test_scores_are_cosine_similarities_of_the_embeddings(server: Server, path: str, pooling: str | None) -> None:
    found = post(server, path, model=NAME, text_1=QUERY, text_2=DOCUMENTS, pooling=pooling)
    assert found.keys() == {"id", "object", "created", "model", "data", "usage"}
    assert (found["object"], found["model"]) == ("list", NAME)
    assert [(one["index"], one["object"]) for one in found["data"]] == [(index, "score") for index in range(4)]
    (query,), documents = (vectors(server, texts, pooling=pooling) for texts in ([QUERY], DOCUMENTS))
    np.testing.assert_allclose([one["score"] for one in found["data"]], documents @ query, atol=1e-5)
    assert found["data"][2]["score"] == pytest.approx(1, abs=1e-5)
    count = tokens(server, [QUERY, *DOCUMENTS])
    assert found["usage"] == {"prompt_tokens": count, "total_tokens": count}


def test_lists_of_equal_length_are_scored_pair_by_pair(server: Server) -> None:
    found = post(server, "/score", text_1=DOCUMENTS, text_2=DOCUMENTS[::-1], use_activation=False, priority=0)
    one = vectors(server, DOCUMENTS)
    np.testing.assert_allclose([each["score"] for each in found["data"]], (one * one[::-1]).sum(1), atol=1e-5)
    (alone,) = post(server, "/score", text_1=["jumps"], text_2="jumps")["data"]
    assert alone["score"] == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank_orders_documents_by_similarity_to_the_query(server: Server, path: str) -> None:
    found = post(server, path, model=NAME, query=QUERY, documents=DOCUMENTS)
    assert found.keys() == {"id", "model", "usage", "results"}
    assert found["usage"] == {"total_tokens": tokens(server, [QUERY, *DOCUMENTS])}
    similarities = vectors(server, DOCUMENTS) @ vectors(server, [QUERY])[0]
    scores = [one["relevance_score"] for one in found["results"]]
    assert scores == sorted(scores, reverse=True)
    order = [one["index"] for one in found["results"]]
    assert sorted(order) == [0, 1, 2, 3]
    assert order[0] == 2
    np.testing.assert_allclose(scores, similarities[order], atol=1e-5)
    assert [one["document"] for one in found["results"]] == [{"text": DOCUMENTS[index]} for index in order]
    best = post(server, path, query=QUERY, documents=DOCUMENTS, top_n=1, return_documents=False)["results"]
    assert [(one.keys(), one["index"]) for one in best] == [({"index", "relevance_score"}, 2)]
    assert len(post(server, path, query=QUERY, documents=DOCUMENTS, top_n=0)["results"]) == 4


def test_pooling_returns_the_embeddings_in_the_shape_of_vllm(server: Server) -> None:
    found = post(server, "/pooling", model=NAME, input=DOCUMENTS, task="embed", user="me")
    assert found.keys() == {"id", "object", "created", "model", "data", "usage"}
    assert [(one["index"], one["object"]) for one in found["data"]] == [(index, "pooling") for index in range(4)]
    np.testing.assert_allclose([one["data"] for one in found["data"]], vectors(server, DOCUMENTS), atol=1e-5)
    (encoded,) = post(server, "/pooling", input=QUERY, encoding_format="base64", dimensions=8)["data"]
    found_8 = np.frombuffer(base64.b64decode(encoded["data"]), "<f4")
    np.testing.assert_allclose(found_8, vectors(server, [QUERY], dimensions=8)[0], atol=1e-5)


def test_pooling_without_activation_does_not_normalise(server: Server) -> None:
    (raw,) = post(server, "/pooling", input=QUERY, use_activation=False)["data"]
    length = np.linalg.norm(raw["data"])
    assert abs(length - 1) > 0.1
    np.testing.assert_allclose(np.array(raw["data"]) / length, vectors(server, [QUERY])[0], atol=1e-5)


@pytest.mark.parametrize(
    ("path", "fields", "param", "message"),
    [
        ("/score", {"text_1": "a"}, "text_2", ""),
        ("/score", {"text_1": [], "text_2": "a"}, "text_1", "allowed: at least one text"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2", "allowed: at least one text"),
        (
            "/score",
            {"text_1": ["a", "b"], "text_2": "c"},
            "text_1",
            "has 2 texts; allowed: one text, or as many as",
        ),
        ("/score", {"text_1": "a", "text_2": ["b"] * 2049}, "text_2", "allowed: at most 2048"),
        ("/score", {"text_1": "a", "text_2": ["b", "c " * 20_000]}, "text_2[1]", "allowed: texts of fewer"),
        ("/score", {"text_1": "c " * 1500, "text_2": "b"}, "text_1", "allowed: at most"),
        ("/score", {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "never cut"),
        ("/score", {"text_1": "a", "text_2": "b", "pooling": "cls"}, "pooling", ""),
        ("/score", {"text_1": {"content": []}, "text_2": "b"}, "text_1", ""),
        ("/rerank", {"query": "a", "documents": []}, "documents", "allowed: at least one text"),
        ("/rerank", {"query": ["a"], "documents": ["b"]}, "query", ""),
        ("/rerank", {"query": "a", "documents": ["b", "c " * 1500]}, "documents[1]", "allowed: at most"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "allowed: integers from 0"),
        ("/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 9}, "max_tokens_per_doc", "never cut"),
        ("/pooling", {"input": "a", "task": "token_embed"}, "task", "embed"),
        ("/pooling", {"input": "a", "messages": []}, "messages", "takes input"),
        ("/pooling", {"input": "a", "normalize": False}, "normalize", "use_activation"),
        ("/pooling", {"input": "a", "dimensions": 65}, "dimensions", "hidden size"),
    ],
)
def test_invalid_field_gets_400_that_names_it(
    server: Server, path: str, fields: dict[str, object], param: str, message: str
) -> None:
    answer = server.call("POST", path, fields)
    assert answer.status == 400, answer.body
    assert answer.error()["param"] == param
    assert message in str(answer.error()["message"])


def test_unknown_model_gets_404(server: Server) -> None:
    for path, fields in (("/score", {"text_1": "a", "text_2": "b"}), ("/rerank", {"query": "a", "documents": ["b"]})):
        assert server.call("POST", path, {"model": "other", **fields}).status == 404
