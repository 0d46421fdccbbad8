"""Tests of trainers' own clients, and of requests as trainers send them, against `tok serve --enable-rl`."""

from __future__ import annotations

import asyncio
import json
import shutil
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from support.conformance import NAME, served
from support.patience import PATIENCE
from tok_server.demo import MODEL_DIR

PROMPT = [5, 6, 7, 8]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server's address, without /v1."""
    flags = ("--enable-rl", "--logprobs-mode", "processed_logprobs")
    with served(tmp_path_factory.mktemp("trainers"), *flags) as address:
        yield address


def call(method: str, url: str, body: object = None) -> Any:
    """Return the answer of a request, which must have status 200: JSON, or text."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:  # raises for other statuses
        text = answer.read().decode()
        return json.loads(text) if answer.headers.get_content_type() == "application/json" else text


def post(url: str, path: str, body: object = None) -> Any:
    return call("POST", url + path, body)


def get(url: str, path: str) -> Any:
    return call("GET", url + path)


def test_trl_client_reads_the_server_and_resets_its_cache(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from trl.generation import vllm_client

    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda *_: True)  # only weight updates use vLLM
    trl = vllm_client.VLLMClient(base_url=url)
    with trl.session:
        assert trl.get_world_size() == 1
        assert trl.get_server_info()["parallel_config"]["tensor_parallel_size"] == 1
        trl.reset_prefix_cache()
        # As GRPO asks: prompts of token ids, log-probabilities of what was sampled.
        found = trl.generate(
            [PROMPT, PROMPT], n=2, temperature=0.7, max_tokens=4, generation_kwargs={"ignore_eos": True}
        )
        assert found["prompt_ids"] == [PROMPT, PROMPT]
        assert [len(one) for one in found["completion_ids"]] == [4] * 4


def test_trl_async_grpo_pauses_and_generates_turns(url: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from accelerate import PartialState
        from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop
        from trl.experimental.async_grpo.vllm_client import VLLMClient
    PartialState()  # trainers make one; their loggers need it
    client = VLLMClient(url)
    client.wait_for_server_ready()
    assert client.get_max_model_len() == 1024
    assert client.get_dtype() == "torch.float32"
    assert client.get_world_size() == 1
    client.pause()
    assert get(url, "/is_paused") == {"is_paused": True}
    client.resume()
    # The rollout worker's own request, of a loop without its queues.
    loop: Any = object.__new__(_AsyncRolloutLoop)
    settings = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
    vars(loop).update(settings, lora_name=None, model_name=NAME, max_tokens=6, request_timeout=60, vllm_server_url=url)

    async def turn() -> tuple[list[int], list[float]]:
        async with aiohttp.ClientSession() as session:
            loop.session = session
            found: tuple[list[int], list[float]] = await loop._generate_one_turn(PROMPT)
            return found

    ids, logprobs = asyncio.run(turn())
    assert 1 <= len(ids) == len(logprobs) <= 6
    assert all(one <= 0 for one in logprobs)


def test_prime_rl_updates_from_a_directory_and_salts_with_the_version(url: str, tmp_path: Path) -> None:
    get(url, "/health")
    (model,) = get(url, "/v1/models")["data"]
    assert (model["id"], model["max_model_len"]) == (NAME, 1024)

    def generate(version: int) -> Any:
        body = {
            "model": NAME,
            "token_ids": PROMPT * 20,
            "sampling_params": {
                "temperature": 1.0,
                "max_tokens": 4,
                "logprobs": 1,
                "skip_special_tokens": False,
                "spaces_between_special_tokens": False,
            },
            "cache_salt": str(version),
            "priority": None,
        }
        return post(url, "/inference/v1/generate", body)

    first = generate(0)
    directory = tmp_path / "step_1"
    shutil.copytree(MODEL_DIR, directory)
    post(url, "/pause?mode=keep&clear_cache=false")
    (directory / "NCCL_READY").touch()  # for its other kind of broadcast
    post(url, "/update_weights", {"weight_dir": directory.as_posix()})
    post(url, "/resume")
    second = generate(1)
    for answer in (first, second):
        (choice,) = answer["choices"]
        assert len(choice["token_ids"]) == len(choice["logprobs"]["content"])
        assert choice["finish_reason"] in ("stop", "length")
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert generate(1)["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
    # A teacher's scores: it takes the first entry of each position for the prompt's own token.
    params = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "prompt_logprobs": 1}
    body = {"model": NAME, "token_ids": PROMPT, "sampling_params": params}
    leading, *scores = post(url, "/inference/v1/generate", body)["prompt_logprobs"]
    assert leading is None
    assert [int(next(iter(one))) for one in scores] == PROMPT[1:]


def test_slime_generates_aborts_and_updates_from_disk(url: str) -> None:
    get(url, "/health_generate")
    assert get(url, "/server_info")["tp_size"] == 1
    body = {
        "input_ids": PROMPT,
        "sampling_params": {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "max_new_tokens": 5,
            "stop": None,
            "stop_token_ids": None,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
        },
        "return_logprob": True,
    }
    found = post(url, "/generate", body)
    info = found["meta_info"]
    assert [one[1] for one in info["output_token_logprobs"]] == found["output_ids"]
    assert all(one[0] <= 0 for one in info["output_token_logprobs"])
    assert info["finish_reason"]["type"] in ("stop", "length")
    assert post(url, "/abort_request", {"abort_all": True}) == ""
    post(url, "/pause_generation", {"mode": "retract"})
    get(url, "/flush_cache")
    updated = post(url, "/update_weights_from_disk", {"model_path": str(MODEL_DIR), "weight_version": "9"})
    assert updated["success"]
    post(url, "/continue_generation", {})
    assert get(url, "/get_weight_version") == {"weight_version": "9"}
    assert post(url, "/generate", body)["meta_info"]["weight_version"] == "9"
    assert get(url, "/v1/loads")["loads"][0]["num_total_reqs"] == 0


def test_grpo_with_trl_updates_a_running_server(tmp_path: Path) -> None:
    from support.grpo_demo import train

    rewards = train(tmp_path, 2, prompts=2, samples=4)
    assert len(rewards) == 2
    assert all(0 < reward < 1 for reward in rewards)
