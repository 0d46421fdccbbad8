"""Streams of the trainers' endpoints that generate: vLLM's /inference/v1/generate and SGLang's /generate."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest

from support.background import Later
from support.paused_engine import held
from support.serving import Answer, Server, serving
from support.tiny_models import make_model
from support.token_requests import (
    GREEDY,
    PROMPT,
    SGLANG_GREEDY,
    expected,
    generate,
    inference,
    output_tokens_when_idle,
    wait_until_running,
)
from tok_client import AsyncClient, Client


@pytest.fixture(scope="module")
def rl_server(tiny_model: Path) -> Iterator[Server]:
    with serving(tiny_model, enable_rl=True) as running:
        yield running


def samples(answer: Answer) -> list[Any]:
    found = json.loads(answer.body)
    assert isinstance(found, list)
    return found


def sglang_events(answer: Answer) -> list[Any]:
    """Return the events of a stream of one sample, which each hold all of it so far."""
    events: list[Any] = answer.chunks()
    assert answer.status == 200
    for before, after in pairwise(events):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert after["meta_info"]["completion_tokens"] == len(after["output_ids"])
    assert [one["meta_info"]["finish_reason"] for one in events[:-1]] == [None] * (len(events) - 1)
    return events


def without_latency(generation: Any) -> Any:
    del generation["meta_info"]["e2e_latency"]
    return generation


def test_sglang_streams_the_whole_sample_so_far_in_each_event(rl_server: Server) -> None:
    for fields in (
        {},
        {"return_logprob": True},
        {"return_logprob": True, "logprob_start_len": 2, "top_logprobs_num": 3},
    ):
        body = {"rid": "s", "sampling_params": {**SGLANG_GREEDY, "max_new_tokens": 40, "stop": ["zz"]}, **fields}
        generate(rl_server, **body)  # so that both find the prompt in the cache
        whole = without_latency(generate(rl_server, **body).json())
        events = sglang_events(generate(rl_server, stream=True, **body))
        assert len(events) > 1
        assert without_latency(events[-1]) == whole


def test_sglang_streams_batches_by_index(rl_server: Server) -> None:
    params = [{**SGLANG_GREEDY, "n": 2}, {**SGLANG_GREEDY, "max_new_tokens": 3}]
    body = {"input_ids": [PROMPT, [9, 8, 7]], "sampling_params": params, "return_logprob": [False, True], "rid": "b"}
    generate(rl_server, **body)
    whole = [without_latency(one) for one in samples(generate(rl_server, **body))]
    events: list[Any] = generate(rl_server, stream=True, **body).chunks()
    last = {event.pop("index"): without_latency(event) for event in events}
    assert [last[index] for index in range(3)] == whole


def test_sglang_shows_texts_beside_logprobs(rl_server: Server) -> None:
    prompt, params = "two words", {**SGLANG_GREEDY, "max_new_tokens": 3}
    fields = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1, "return_text_in_logprobs": True}
    body = {"text": prompt, "sampling_params": params, **fields}
    (last,) = rl_server.call("POST", "/generate", body | {"stream": True}).chunks()[-1:]
    whole: Any = rl_server.call("POST", "/generate", body).json()
    for info in (last["meta_info"], whole["meta_info"]):
        read: Any = info
        assert "".join(text for _, _, text in read["input_token_logprobs"]).endswith(prompt)
        assert all(isinstance(one[0][2], str) for one in read["output_top_logprobs"])


def test_sglang_only_caches_a_prompt(rl_server: Server) -> None:
    prompt = list(range(100, 164))
    found: Any = generate(rl_server, input_ids=prompt, sampling_params={"max_new_tokens": 0}).json()
    assert (found["output_ids"], found["meta_info"]["finish_reason"]["type"]) == ([], "length")
    assert "input_token_logprobs" not in found["meta_info"]
    again: Any = generate(rl_server, input_ids=prompt).json()
    assert again["meta_info"]["cached_tokens"] == 48
    (event,) = generate(rl_server, input_ids=prompt, sampling_params={"max_new_tokens": 0}, stream=True).chunks()
    assert event["output_ids"] == []


def test_sglang_reports_the_model(rl_server: Server) -> None:
    for path in ("/model_info", "/get_model_info"):
        found: Any = rl_server.call("GET", path).json()
        assert (found["served_model_name"], found["is_generation"]) == ("tiny", True)
        assert found["weight_version"] == "default"
    assert rl_server.call("GET", "/get_server_info").json() == rl_server.call("GET", "/server_info").json()


def test_vllm_streams_new_tokens_and_the_usage(rl_server: Server) -> None:
    params = {"n": 2, "seed": 5, "max_tokens": 12, "logprobs": 1, "stop": ["zz"]}
    inference(rl_server, sampling_params=params)
    whole: Any = inference(rl_server, sampling_params=params, request_id="v").json()
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = inference(rl_server, sampling_params=params, request_id="v", stream=True, stream_options=options)
    *chunks, last = answer.chunks()
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert {chunk["request_id"] for chunk in chunks} == {"generate-tokens-v"}
    gained: list[Any] = [one for chunk in chunks for one in cast("list[object]", chunk["choices"])]
    for expected_choice in whole["choices"]:
        choices = [one for one in gained if one["index"] == expected_choice["index"]]
        assert [token for one in choices for token in one["token_ids"]] == expected_choice["token_ids"]
        found = [entry for one in choices if one["logprobs"] for entry in one["logprobs"]["content"]]
        assert found == expected_choice["logprobs"]["content"]
        assert [one["finish_reason"] for one in choices[:-1]] == [None] * (len(choices) - 1)
        for name in ("finish_reason", "stop_reason", "weight_version", "weight_versions"):
            assert choices[-1][name] == expected_choice[name]
    plain = inference(rl_server, sampling_params=params, stream=True).chunks()
    assert all(chunk["choices"] and "usage" not in chunk for chunk in plain)


@pytest.mark.parametrize("path", ["/generate", "/inference/v1/generate"])
def test_streams_of_aborted_requests_end_with_their_tokens(rl_server: Server, path: str) -> None:
    before = output_tokens_when_idle(rl_server)
    with held(rl_server.engine):
        if path == "/generate":
            params: Any = {**SGLANG_GREEDY, "max_new_tokens": 600}
            long = Later(lambda: generate(rl_server, rid="long", sampling_params=params, stream=True))
        else:
            params = {**GREEDY, "max_tokens": 600}
            long = Later(lambda: inference(rl_server, request_id="long", sampling_params=params, stream=True))
        wait_until_running(rl_server, before)
        assert rl_server.call("POST", "/abort_request", {"rid": "long"}).status == 200
    chunks: Any = long.answer().chunks()
    if path == "/generate":
        assert chunks[-1]["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < len(chunks[-1]["output_ids"]) < 600
    else:
        assert chunks[-1]["choices"][0]["finish_reason"] == "abort"
        assert 0 < sum(len(chunk["choices"][0]["token_ids"]) for chunk in chunks) < 600


def test_streams_say_which_weights_made_which_tokens(rl_server: Server, tiny_model: Path, tmp_path: Path) -> None:
    new = make_model("llama", tmp_path / "new", seed=1)
    before = output_tokens_when_idle(rl_server)
    params = {**SGLANG_GREEDY, "max_new_tokens": 500}
    body = {"weight_dir": str(new), "weight_version": "7"}
    try:
        with held(rl_server.engine):
            first = Later(lambda: generate(rl_server, sampling_params=params, stream=True))
            second = Later(lambda: inference(rl_server, sampling_params={**GREEDY, "max_tokens": 500}, stream=True))
            wait_until_running(rl_server, before, sequences=2)
            assert rl_server.call("POST", "/update_weights", body).status == 200
        events: Any = first.answer().chunks()
        chunks: Any = second.answer().chunks()
        assert events[0]["meta_info"]["weight_version"] == "default"
        for one in (events[-1]["meta_info"], chunks[-1]["choices"][0]):
            assert one["weight_version"] == "7"
            (old, start), (latest, change) = one["weight_spans"]
            assert (old, start, latest) == ("default", 0, "7")
            assert 0 < change < 500
            spans = [("default", 0, change), ("7", change, 500)]
            assert [tuple(span.values()) for span in one["weight_versions"]] == spans
    finally:
        body = {"weight_dir": str(tiny_model), "weight_version": "default"}
        assert rl_server.call("POST", "/update_weights", body).status == 200


def test_the_number_of_tokens_is_by_default_what_the_model_leaves(rl_server: Server) -> None:
    params = {"temperature": 0, "ignore_eos": True}
    found: Any = inference(rl_server, sampling_params=params).json()
    assert found["usage"]["total_tokens"] == rl_server.engine.info.max_model_len


def test_the_prompts_own_token_comes_first(rl_server: Server) -> None:
    params = {"max_tokens": 1, "prompt_logprobs": 3}
    found: Any = inference(rl_server, sampling_params=params).json()
    entries = found["prompt_logprobs"][1:]
    assert [int(next(iter(one))) for one in entries] == PROMPT[1:]
    assert any(next(iter(one.values()))["rank"] > 3 for one in entries)


def test_the_client_streams(rl_server: Server, tiny_model: Path) -> None:
    with Client(rl_server.url) as client:
        chunks = list(client.rl.generate(PROMPT, GREEDY, stream=True, stream_options={"include_usage": True}))
    assert [token for chunk in chunks for choice in chunk.choices for token in choice.token_ids] == expected(tiny_model)
    assert chunks[-2].choices[0].weight_version == "default"
    assert chunks[-1].usage
    assert chunks[-1].usage.completion_tokens == 8


async def test_the_async_client_streams(rl_server: Server, tiny_model: Path) -> None:
    async with AsyncClient(rl_server.url) as client, await client.rl.generate(PROMPT, GREEDY, stream=True) as stream:
        tokens = [token async for chunk in stream for choice in chunk.choices for token in choice.token_ids]
    assert tokens == expected(tiny_model)


def test_a_stream_is_refused_before_it_begins(rl_server: Server) -> None:
    for answer, param in (
        (generate(rl_server, stream=True, input_ids=[10**9]), "input_ids"),
        (generate(rl_server, stream=True, sampling_params={"max_new_tokens": -1}), "max_new_tokens"),
        (inference(rl_server, stream=True, sampling_params={"prompt_logprobs": 1}), "prompt_logprobs"),
        (inference(rl_server, stream_options={"include_usage": True}), "stream_options"),
    ):
        assert answer.status == 400
        assert answer.error()["param"] == param
