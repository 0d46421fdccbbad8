"""Tests of TRL's clients that send weights to `tok serve --enable-rl`, with gloo in place of vLLM's NCCL."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from support import vllm_stand_in
from support.conformance import served
from support.serving import free_port
from support.tiny_models import reference_greedy
from tok_client import Client
from tok_server.demo import MODEL_DIR

PROMPT = [5, 6, 7, 8]
TOKENS = 12
CLIENT = "trl.generation.vllm_client"
ASYNC_CLIENT = "trl.experimental.async_grpo.weight_transfer"

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server's address, without /v1."""
    with served(tmp_path_factory.mktemp("trl"), "--enable-rl") as address:
        yield address


@pytest.fixture
def model(url: str) -> Iterator[Any]:
    """The trainer's model, with other weights than the server; the server gets its first weights back."""
    found = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3 * parameter.std())
    yield found
    with Client(f"{url}/v1") as client:
        client.rl.update_weights(MODEL_DIR, weight_version="default")


def greedy(url: str) -> list[int]:
    with Client(f"{url}/v1") as client:
        (choice,) = client.rl.generate(PROMPT, {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}).choices
    return choice.token_ids


def expected(model: Any, path: Path) -> list[int]:
    """Return the tokens of transformers."""
    model.save_pretrained(path)
    return reference_greedy(path, [PROMPT], TOKENS)[0][0]


@pytest.mark.parametrize("version", ["0.31.0", "0.27.0"])  # TRL calls vLLM by other functions before 0.28
def test_vllm_client_sends_whole_models_and_single_parameters(
    url: str, model: Any, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm_stand_in.install(monkeypatch, version, CLIENT)
    trl = importlib.import_module(CLIENT).VLLMClient(base_url=url, group_port=free_port())
    before = greedy(url)
    with trl.session:
        trl.init_communicator(device="cuda")  # "cpu" is refused; without an index, it touches no device
        trl.update_model_params(model)
        assert greedy(url) == expected(model, tmp_path / "all") != before
        with torch.no_grad():
            model.get_output_embeddings().weight.copy_(model.get_output_embeddings().weight.roll(1, 0))
        first, *others = model.named_parameters()
        trl.update_named_param(first[0], first[1].data)
        with trl.weight_update():
            for name, parameter in others:
                trl.update_named_param(name, parameter.data)
        trl.reset_prefix_cache()
        assert greedy(url) == expected(model, tmp_path / "some")
        trl.close_communicator()


def test_async_grpo_sends_weights_to_a_paused_server(
    url: str, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate import PartialState

    PartialState()  # trainers make one; their loggers need it
    vllm_stand_in.install(monkeypatch, "0.31.0", ASYNC_CLIENT)
    trl = importlib.import_module(ASYNC_CLIENT)
    parameters = dict(model.named_parameters())
    info = {
        "names": list(parameters),
        "dtype_names": [str(one.dtype).removeprefix("torch.") for one in parameters.values()],
        "shapes": [list(one.shape) for one in parameters.values()],
    }
    transfer = trl.WeightTransferClient(trl.VLLMClient(url), info)
    before = greedy(url)
    transfer.init_weight_transfer()
    for step in range(2):
        transfer.pause()
        transfer.send_weights((name, one.data) for name, one in parameters.items())
        transfer.resume()
        assert greedy(url) == expected(model, tmp_path / str(step)) != before
        before = greedy(url)
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.mul_(-1)
    transfer.destroy()
