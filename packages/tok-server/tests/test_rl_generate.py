"""Trainers' endpoints that generate: vLLM's /inference/v1/generate and SGLang's /generate, with their aborts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.background import Later
from support.paused_engine import held
from support.serving import Answer, Server, serving
from support.tiny_models import make_model, reference_logits
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
from tok_client import Client


@pytest.fixture(scope="module")
def rl_server(tiny_model: Path) -> Iterator[Server]:
    with serving(tiny_model, enable_rl=True) as running:
        yield running


def ids_of(answer: Answer) -> list[int]:
    found: list[int] = answer.json()["output_ids"]  # type: ignore[assignment]
    return found


def reference_logprobs(path: Path, tokens: list[int]) -> list[float]:
    """Return the log-probability of each token but the first, given those before it."""
    logprobs = reference_logits(path, tokens).log_softmax(-1)[:-1]
    return [float(row[token]) for row, token in zip(logprobs, tokens[1:], strict=True)]


def test_vllm_generates_token_ids(rl_server: Server, tiny_model: Path) -> None:
    params = {**GREEDY, "logprobs": 1, "prompt_logprobs": 0, "detokenize": False}
    answer = inference(rl_server, sampling_params=params, request_id="a", model="tiny", priority=0)
    found: Any = answer.json()
    assert (answer.status, found["request_id"]) == (200, "generate-tokens-a")
    (choice,) = found["choices"]
    assert choice["token_ids"] == expected(tiny_model)
    assert (choice["finish_reason"], choice["stop_reason"], choice["weight_version"]) == ("length", None, "default")
    assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": 8}]
    content = choice["logprobs"]["content"]
    assert [one["token"] for one in content] == [f"token_id:{token}" for token in choice["token_ids"]]
    exact = reference_logprobs(tiny_model, PROMPT + choice["token_ids"])
    assert [one["logprob"] for one in content] == pytest.approx(exact[len(PROMPT) - 1 :], abs=1e-3)
    assert found["prompt_logprobs"][0] is None
    of_prompt = [entry[str(token)] for token, entry in zip(PROMPT[1:], found["prompt_logprobs"][1:], strict=True)]
    assert [one["logprob"] for one in of_prompt] == pytest.approx(exact[: len(PROMPT) - 1], abs=1e-3)
    assert all(isinstance(one["rank"], int) for one in of_prompt)
    assert found["usage"]["total_tokens"] == len(PROMPT) + 8
    assert "sampling_params.detokenize" in answer.headers["x-tok-ignored"]


def test_vllm_returns_n_samples_and_honours_stops_and_grammars(rl_server: Server) -> None:
    params = {"n": 3, "seed": 1, "max_tokens": 5, "structured_outputs": {"regex": "[0-9]{3}"}}
    found: Any = inference(rl_server, sampling_params=params).json()
    assert [one["index"] for one in found["choices"]] == [0, 1, 2]
    assert {one["finish_reason"] for one in found["choices"]} <= {"stop", "length"}


def test_cache_salt_keeps_prefixes_apart(rl_server: Server) -> None:
    prompt = list(range(200, 264))

    def cached(**fields: object) -> int:
        found: Any = inference(rl_server, token_ids=prompt, **fields).json()
        return int(found["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [cached(cache_salt=salt) for salt in ("1", "1", "2", "2", "1")] == [0, 48, 0, 48, 48]
    assert cached() == 0

    def sglang_cached(**fields: object) -> int:
        found: Any = generate(rl_server, input_ids=prompt, **fields).json()
        return int(found["meta_info"]["cached_tokens"])

    assert [sglang_cached(extra_key=key) for key in ("a", "a", "b")] == [0, 48, 0]
    assert sglang_cached(cache_salt="2") == 48


def test_sglang_generates_from_token_ids_with_logprobs(rl_server: Server, tiny_model: Path) -> None:
    answer = generate(rl_server, rid="r", return_logprob=True, logprob_start_len=0, top_logprobs_num=2)
    found: Any = answer.json()
    info = found["meta_info"]
    assert answer.status == 200
    assert found["output_ids"] == expected(tiny_model)
    assert info["finish_reason"] == {"type": "length", "length": 8}
    assert (info["id"], info["weight_version"]) == ("r", "default")
    assert (info["prompt_tokens"], info["completion_tokens"]) == (len(PROMPT), 8)
    exact = reference_logprobs(tiny_model, PROMPT + found["output_ids"])
    first, *others = info["input_token_logprobs"]
    assert first == [None, PROMPT[0], None]
    assert [token for _, token, _ in others] == PROMPT[1:]
    assert [one[0] for one in others] == pytest.approx(exact[: len(PROMPT) - 1], abs=1e-3)
    assert [token for _, token, _ in info["output_token_logprobs"]] == found["output_ids"]
    assert [one[0] for one in info["output_token_logprobs"]] == pytest.approx(exact[len(PROMPT) - 1 :], abs=1e-3)
    assert [len(one) for one in info["output_top_logprobs"]] == [2] * 8
    assert info["output_top_logprobs"][0][0] == info["output_token_logprobs"][0]
    assert info["input_top_logprobs"][0] is None
    assert len(info["input_top_logprobs"]) == len(PROMPT)


def test_sglang_reports_the_prompts_logprobs_from_a_position(rl_server: Server) -> None:
    whole: Any = generate(rl_server, return_logprob=True, logprob_start_len=0).json()
    part: Any = generate(rl_server, return_logprob=True, logprob_start_len=3).json()
    none: Any = generate(rl_server, return_logprob=True).json()
    assert part["meta_info"]["input_token_logprobs"] == whole["meta_info"]["input_token_logprobs"][3:]
    assert none["meta_info"]["input_token_logprobs"] == []
    without: Any = generate(rl_server).json()
    assert "input_token_logprobs" not in without["meta_info"]


def test_sglang_answers_batches_and_several_samples_with_lists(rl_server: Server) -> None:
    prompts = [PROMPT, [9, 8, 7]]
    params = [SGLANG_GREEDY, {**SGLANG_GREEDY, "max_new_tokens": 3}]
    found = samples(generate(rl_server, input_ids=prompts, sampling_params=params, rid="b"))
    assert [one["meta_info"]["id"] for one in found] == ["b_0", "b_1"]
    alone = [
        ids_of(generate(rl_server, input_ids=one, sampling_params=p)) for one, p in zip(prompts, params, strict=True)
    ]
    assert [one["output_ids"] for one in found] == alone
    several = samples(generate(rl_server, sampling_params={"n": 2, "max_new_tokens": 2, "sampling_seed": 3}))
    assert len(several) == 2
    texts = generate_text(rl_server, ["one", "two words"])
    assert [one["meta_info"]["completion_tokens"] for one in texts] == [8, 8]
    assert all(isinstance(one["text"], str) for one in texts)


def generate_text(server: Server, text: object) -> list[Any]:
    return samples(server.call("POST", "/generate", {"text": text, "sampling_params": SGLANG_GREEDY}))


def samples(answer: Answer) -> list[Any]:
    found = json.loads(answer.body)
    assert isinstance(found, list)
    return found


def test_sglang_names_what_ended_a_sample(rl_server: Server, tiny_model: Path) -> None:
    token = expected(tiny_model)[3]
    found: Any = generate(rl_server, sampling_params={**SGLANG_GREEDY, "stop_token_ids": [token]}).json()
    assert found["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}
    other: Any = inference(rl_server, sampling_params={**GREEDY, "stop_token_ids": [token]}).json()
    assert other["choices"][0]["stop_reason"] == token
    longest: Any = generate(rl_server, sampling_params={**SGLANG_GREEDY, "max_new_tokens": 10**6}).json()
    total = longest["meta_info"]["prompt_tokens"] + longest["meta_info"]["completion_tokens"]
    assert total == rl_server.engine.info.max_model_len


@pytest.mark.parametrize("body", [{"rid": "long"}, {"abort_all": True}])
def test_sglang_answers_an_aborted_request_with_its_tokens(rl_server: Server, body: object) -> None:
    before = output_tokens_when_idle(rl_server)
    params = {**SGLANG_GREEDY, "max_new_tokens": 600}
    with held(rl_server.engine):
        long = Later(lambda: generate(rl_server, rid="long", sampling_params=params, return_logprob=True))
        wait_until_running(rl_server, before)
        assert rl_server.call("POST", "/abort_request", {"rid": "other"}).status == 200
        assert rl_server.call("POST", "/abort_request", body).status == 200
    found: Any = long.answer().json()
    assert found["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(found["output_ids"]) < 600
    assert len(found["meta_info"]["output_token_logprobs"]) == len(found["output_ids"])


@pytest.mark.parametrize(("rid", "aborted"), [("b", [True, True]), ("b_1", [False, True])])
def test_sglang_aborts_a_batch_or_one_of_its_prompts(rl_server: Server, rid: str, aborted: list[bool]) -> None:
    before = output_tokens_when_idle(rl_server)
    body = {"input_ids": [PROMPT, PROMPT[::-1]], "rid": "b", "sampling_params": {**SGLANG_GREEDY, "max_new_tokens": 60}}
    with held(rl_server.engine):
        batch = Later(lambda: rl_server.call("POST", "/generate", body))
        wait_until_running(rl_server, before, sequences=2)
        assert rl_server.call("POST", "/abort_request", {"rid": rid}).status == 200
    found = json.loads(batch.answer().body)
    assert [one["meta_info"]["finish_reason"]["type"] == "abort" for one in found] == aborted


def test_vllm_answers_an_aborted_request_with_its_tokens(rl_server: Server) -> None:
    before = output_tokens_when_idle(rl_server)
    with held(rl_server.engine):
        long = Later(lambda: inference(rl_server, request_id="l", sampling_params={**GREEDY, "max_tokens": 600}))
        wait_until_running(rl_server, before)
        assert rl_server.call("POST", "/abort_requests", {"request_ids": ["x", "generate-tokens-l"]}).status == 200
    body: Any = long.answer().json()
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "abort"
    whole = expected_long(rl_server, len(choice["token_ids"]))
    assert 0 < len(choice["token_ids"]) < 600
    assert choice["token_ids"] == whole


def expected_long(server: Server, count: int) -> list[int]:
    return ids_of(generate(server, sampling_params={**SGLANG_GREEDY, "max_new_tokens": count}))


def test_answers_say_which_weights_made_which_tokens(rl_server: Server, tiny_model: Path, tmp_path: Path) -> None:
    new = make_model("llama", tmp_path / "new", seed=1)
    before = output_tokens_when_idle(rl_server)
    params = {**SGLANG_GREEDY, "max_new_tokens": 500}
    body = {"weight_dir": str(new), "weight_version": "7"}
    try:
        with held(rl_server.engine):
            first = Later(lambda: generate(rl_server, sampling_params=params))
            second = Later(lambda: inference(rl_server, sampling_params={**GREEDY, "max_tokens": 500}))
            wait_until_running(rl_server, before, sequences=2)
            assert rl_server.call("POST", "/update_weights", body).status == 200
        info: Any = first.answer().json()["meta_info"]
        other: Any = second.answer().json()
        (choice,) = other["choices"]
        for one in (info, choice):
            assert one["weight_version"] == "7"
            (old, start), (latest, change) = one["weight_spans"]
            assert (old, start, latest) == ("default", 0, "7")
            assert 0 < change < 500
            spans = [("default", 0, change), ("7", change, 500)]
            assert [tuple(span.values()) for span in one["weight_versions"]] == spans
    finally:
        body = {"weight_dir": str(tiny_model), "weight_version": "default"}
        assert rl_server.call("POST", "/update_weights", body).status == 200


def test_loads_count_requests_and_tokens_of_each_replica(rl_server: Server) -> None:
    found: Any = rl_server.call("GET", "/v1/loads").json()
    (load,) = found["loads"]
    assert (found["dp_rank_count"], load["dp_rank"]) == (1, 0)
    assert load["num_total_reqs"] == load["num_running_reqs"] + load["num_waiting_reqs"]
    assert load["max_total_num_tokens"] == rl_server.engine.info.kv_cache_tokens
    assert 0 <= load["token_usage"] <= 1


def test_a_prompt_of_any_length_is_scored_with_its_ranks(rl_server: Server) -> None:
    prompt = [(7 * i) % 290 for i in range(rl_server.engine.info.max_model_len - 1)]
    params = {"max_tokens": 1, "prompt_logprobs": 0}
    found: Any = inference(rl_server, token_ids=prompt, sampling_params=params).json()
    entries = found["prompt_logprobs"]
    assert len(entries) == len(prompt)
    assert [list(one) for one in entries[1:]] == [[str(token)] for token in prompt[1:]]
    assert all(1 <= one[str(token)]["rank"] <= 512 for one, token in zip(entries[1:], prompt[1:], strict=True))


def test_the_client_generates_and_aborts(rl_server: Server, tiny_model: Path) -> None:
    with Client(rl_server.url) as client:
        answer = client.rl.generate(PROMPT, GREEDY, request_id="c", cache_salt="1")
        assert answer.choices[0].token_ids == expected(tiny_model)
        assert answer.choices[0].weight_version == "default"
        client.rl.abort_requests([answer.request_id])


@pytest.mark.parametrize(
    ("path", "body", "param", "allowed"),
    [
        ("/generate", {"input_ids": [1], "text": "a"}, "input_ids", "exactly one"),
        ("/generate", {"sampling_params": {}}, "input_ids", "exactly one"),
        ("/generate", {"input_ids": []}, "input_ids", "one prompt"),
        ("/generate", {"input_ids": [1, [2]]}, "input_ids", "one prompt"),
        ("/generate", {"input_ids": [10**9]}, "input_ids", "0 to"),
        ("/generate", {"input_ids": [1], "lora_path": "x"}, "lora_path", "no adapters"),
        ("/generate", {"input_ids": [1], "return_hidden_states": True}, "return_hidden_states", "not supported"),
        ("/generate", {"input_ids": [1], "logprob_start_len": 2, "return_logprob": True}, "logprob_start_len", "-1 to"),
        ("/generate", {"input_ids": [[1]], "sampling_params": [{}, {}]}, "sampling_params", "one for each"),
        ("/generate", {"input_ids": [[1], [2]], "rid": ["a", "a"]}, "rid", "rid is 'a'; allowed: an id that no open"),
        ("/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens", "from 0"),
        ("/generate", {"input_ids": [1], "sampling_params": {"min_new_tokens": 300}}, "min_new_tokens", "at most"),
        ("/generate", {"input_ids": [1], "sampling_params": {"stop_regex": "a"}}, "stop_regex", "use stop"),
        ("/generate", {"input_ids": [1], "sampling_params": {"regex": "a", "ebnf": "b"}}, "ebnf", "one of"),
        ("/generate", {"input_ids": [1], "sampling_params": {"regex": "("}}, "regex", "("),
        ("/generate", {"input_ids": [1], "return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num", "20"),
        ("/inference/v1/generate", {"token_ids": [1]}, "sampling_params", "sampling_params"),
        ("/inference/v1/generate", {"token_ids": [], "sampling_params": {}}, "token_ids", "at least"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"top_p": 2}}, "top_p", "0 to 1"),
        (
            "/inference/v1/generate",
            {"token_ids": [1], "sampling_params": {"prompt": "a"}},
            "sampling_params.prompt",
            "",
        ),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {}, "cache_salt": ""}, "cache_salt", "1 to"),
        ("/abort_requests", {}, "request_ids", "request_ids"),
    ],
)
def test_bad_input_names_the_field_and_what_is_allowed(
    rl_server: Server, path: str, body: object, param: str, allowed: str
) -> None:
    answer = rl_server.call("POST", path, body)
    assert answer.status == 400, answer.body
    assert answer.error()["param"] == param
    assert allowed in str(answer.error()["message"])


def test_an_unknown_model_is_not_found(rl_server: Server) -> None:
    assert inference(rl_server, model="other").status == 404
