"""Endpoints that receive a trainer's tensors, with the wire formats of vLLM (as TRL calls it) and of SGLang."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.serving import Answer, Server, free_port, serving
from support.tiny_models import make_model, reference_greedy
from support.trainer import read_line, send_line, trainer, update_info, weights
from tok_client import AsyncClient, BadRequestError, Client

PROMPT = [5, 6, 7, 8, 9]
ASKED = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
BUCKET = 20_000
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def rl_server(tiny_model: Path) -> Iterator[Server]:
    with serving(tiny_model, enable_rl=True) as running:
        yield running


@pytest.fixture(scope="module")
def new_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("new") / "new", seed=1)


@pytest.fixture
def restored(rl_server: Server, tiny_model: Path) -> Iterator[Server]:
    """Return the server; afterwards it has its first weights and is not paused."""
    yield rl_server
    assert post(rl_server, "/resume").status == 200
    assert post(rl_server, "/update_weights", {"weight_dir": str(tiny_model)}).status == 200


def post(server: Server, path: str, body: object = None) -> Answer:
    return server.call("POST", path, body)


def tokens(server: Server) -> list[int]:
    found: list[int] = server.complete(**ASKED).json()["choices"][0]["token_ids"]  # type: ignore[index]
    return found


def expected(path: Path) -> list[int]:
    return reference_greedy(path, [PROMPT], 8)[0][0]


def group(port: int, **fields: object) -> dict[str, object]:
    return {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, **fields}


def test_trl_joins_starts_updates_and_finishes(restored: Server, new_model: Path, tiny_model: Path) -> None:
    server, port = restored, free_port()
    info = server.call("GET", "/server_info?config_format=json").json()
    assert info["vllm_config"]["weight_transfer_config"] == {"backend": "nccl"}  # type: ignore[index]
    assert server.call("GET", "/get_world_size").json() == {"world_size": 1}
    with trainer(port, 2, new_model, bucket_bytes=BUCKET) as process:
        init = {"init_info": group(port, packed=True, packed_buffer_size_bytes=BUCKET)}
        assert post(server, "/init_weight_transfer_engine", init).status == 200
        assert post(server, "/pause?mode=keep").status == 200
        assert post(server, "/start_weight_update", {"is_checkpoint_format": True}).status == 200
        send_line(process)
        answer = post(server, "/update_weights", {"update_info": update_info(weights(new_model))})
        assert (answer.status, answer.json()) == (200, {"status": "ok"})
        assert server.engine.weight_version == "default"
        assert post(server, "/finish_weight_update").status == 200
        assert post(server, "/resume").status == 200
    assert tokens(server) == expected(new_model) != expected(tiny_model)


def test_skyrl_calls_the_methods_of_its_worker_extension(restored: Server, new_model: Path, tiny_model: Path) -> None:
    server, port = restored, free_port()

    def call(method: str, **kwargs: object) -> None:
        answer = post(server, "/collective_rpc", {"method": method, "kwargs": kwargs})
        assert (answer.status, answer.json()) == (200, {"results": [None]})

    with trainer(port, 2, new_model, bucket_bytes=1 << 30) as process:
        assert post(server, "/init_weight_transfer_engine", {"init_info": group(port)}).status == 200
        assert post(server, "/pause?mode=keep&clear_cache=false").status == 200
        call("skyrl_start_weight_update", is_checkpoint_format=True)
        send_line(process)
        call("update_weights_nccl", update_info=update_info(weights(new_model)) | {"packed": True})
        call("skyrl_finish_weight_update")
        assert post(server, "/resume").status == 200
    assert tokens(server) == expected(new_model) != expected(tiny_model)


async def test_the_client_sends_tensors(restored: Server, new_model: Path, tiny_model: Path) -> None:
    info, port = update_info(weights(new_model)), free_port()
    with Client(restored.url) as client, trainer(port, 2, new_model) as process:
        assert client.rl.world_size() == client.rl.world_size(include_dp=False) == 1
        client.rl.init_weight_transfer(group(port))
        client.rl.start_weight_update()
        send_line(process)
        client.rl.update_weights(update_info=info)
        client.rl.finish_weight_update(weight_version="a")
        assert client.rl.weight_version() == "a"
        assert tokens(restored) == expected(new_model)
        with pytest.raises(BadRequestError, match="no open update"):
            client.rl.finish_weight_update()
    port, info = free_port(), update_info(weights(tiny_model))
    with trainer(port, 2, tiny_model) as process:
        async with AsyncClient(restored.url) as client:
            assert await client.rl.world_size() == 1
            await client.rl.init_weight_transfer(group(port))
            await client.rl.start_weight_update()
            send_line(process)
            await client.rl.update_weights(update_info=info, weight_version="b")
            await client.rl.finish_weight_update()
            assert await client.rl.weight_version() == "b"
    assert tokens(restored) == expected(tiny_model)


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
def test_sglangs_trainer_joins_updates_in_two_calls_and_leaves(
    restored: Server, new_model: Path, load_format: str | None
) -> None:
    server, port, size, version = restored, free_port(), 1 << 40 if load_format else 0, f"step-{load_format}"
    info = update_info(weights(new_model))
    calls = {"names": info["names"], "dtypes": info["dtype_names"], "shapes": info["shapes"]}
    with trainer(port, 2, new_model, group="slime-pp_0", bucket_bytes=size) as process:
        answer = post(server, "/init_weights_update_group", group(port, group_name="slime-pp_0", backend="gloo"))
        assert (answer.status, answer.json()["success"]) == (200, True)
        assert post(server, "/pause_generation", {"mode": "in_place"}).status == 200
        send_line(process)
        parts = [slice(None)] if load_format else [slice(None, 5), slice(5, None)]
        for part in parts:
            assert server.engine.weight_version != version
            body: dict[str, object] = {key: value[part] for key, value in calls.items()}
            body |= {"group_name": "slime-pp_0", "weight_version": version, "load_format": load_format}
            answer = post(server, "/update_weights_from_distributed", body)
            assert (answer.status, answer.json()["success"]) == (200, True)
        assert server.call("GET", "/get_weight_version").json() == {"weight_version": version}
        assert post(server, "/continue_generation", {}).status == 200
        answer = post(server, "/destroy_weights_update_group", {"group_name": "slime-pp_0"})
        assert (answer.status, answer.json()["success"]) == (200, True)
        answer = post(server, "/destroy_weights_update_group", {"group_name": "slime-pp_0"})
        assert (answer.status, answer.json()["success"]) == (400, False)
    assert tokens(server) == expected(new_model)


def test_a_trainer_killed_while_it_sends_leaves_the_old_weights(
    restored: Server, new_model: Path, tiny_model: Path
) -> None:
    server, port = restored, free_port()
    info = update_info(weights(new_model))
    with trainer(port, 2, new_model, stall=4) as process, ThreadPoolExecutor(1) as pool:
        assert post(server, "/init_weight_transfer_engine", {"init_info": group(port)}).status == 200
        assert read_line(process) == "joined"
        assert post(server, "/start_weight_update").status == 200
        send_line(process)
        update = pool.submit(post, server, "/update_weights", {"update_info": info})
        assert read_line(process) == "stalled"
        process.kill()
        answer = update.result(timeout=60)
    assert (answer.status, answer.error()["code"]) == (400, "weights_refused")
    assert "trainer" in str(answer.error()["message"])
    answer = post(server, "/finish_weight_update")
    assert answer.status == 400
    assert "the weights are the old ones" in str(answer.error()["message"])
    assert tokens(server) == expected(tiny_model)


INFO = {"names": [DOWN], "dtype_names": ["float32"], "shapes": [[64, 128]]}


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/update_weights", {}, "weight_dir", "either weight_dir"),
        ("/update_weights", {"weight_dir": "/x", "update_info": INFO}, "weight_dir", "not both"),
        (
            "/update_weights",
            {"update_info": {**INFO, "ipc_handles_pickled": "gASVAA=="}},
            "update_info.ipc_handles_pickled",
            "a pickle",
        ),
        ("/update_weights", {"update_info": {**INFO, "shapes": []}}, "update_info.shapes", "as many as names"),
        ("/update_weights", {"update_info": {**INFO, "dtype_names": ["x"]}}, "update_info.dtype_names", "bfloat16"),
        ("/update_weights", {"update_info": {**INFO, "shapes": [[-1]]}}, "update_info.shapes", "integers from 0 to"),
        ("/update_weights", {"update_info": {**INFO, "shapes": [[2**62, 8]]}}, "update_info.shapes", "at most 57646"),
        ("/update_weights", {"update_info": {**INFO, "ipc_handles": [{}]}}, "update_info", "GPU"),
        ("/init_weight_transfer_engine", {"init_info": {"master_port": 5}}, "init_info.master_address", "missing"),
        ("/init_weight_transfer_engine", {"init_info": group(0)}, "init_info.master_port", "1 to 65535"),
        (
            "/init_weight_transfer_engine",
            {"init_info": group(5, master_address="a..b")},
            "init_info",
            "the trainer cannot be reached",
        ),
        (
            "/init_weight_transfer_engine",
            {"init_info": group(5, world_size=1)},
            "init_info.world_size",
            "at least",
        ),
        (
            "/init_weight_transfer_engine",
            {"init_info": group(5, world_size=1 << 40)},
            "init_info.world_size",
            "at most",
        ),
        ("/start_weight_update", {"is_checkpoint_format": False}, "is_checkpoint_format", "allowed: true"),
        ("/finish_weight_update", {}, "finish", "no open update"),
        ("/finish_weight_update", {"weight_version": ""}, "weight_version", "at least one character"),
        ("/update_weights", {"update_info": INFO, "weight_version": ""}, "weight_version", "at least one character"),
        ("/collective_rpc", {}, "method", "method"),
        ("/collective_rpc", {"method": "save_tensorized_model"}, "method", "update_weights_nccl"),
        ("/collective_rpc", {"method": "update_weights_ipc", "kwargs": {"update_info": {}}}, "method", "allowed"),
        ("/collective_rpc", {"method": "update_weights_nccl"}, "kwargs.update_info", "object"),
        ("/collective_rpc", {"method": "update_weights_nccl", "kwargs": {"x": 1}}, "kwargs", "update_info"),
        (
            "/collective_rpc",
            {"method": "skyrl_start_weight_update", "kwargs": {"is_checkpoint_format": False}},
            "is_checkpoint_format",
            "allowed: true",
        ),
        ("/init_weights_update_group", group(5, backend="nccl"), "backend", "gloo"),
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["x"]}, "serialized_named_tensors", "pickles"),
    ],
)
def test_bad_calls_name_the_field(rl_server: Server, path: str, body: object, param: str, message: str) -> None:
    answer = post(rl_server, path, body)
    assert answer.status == 400
    assert answer.error()["param"] == param
    assert message in str(answer.error()["message"])
    assert post(rl_server, "/init_weight_transfer_engine", {"init_info": {}}).status == 200
