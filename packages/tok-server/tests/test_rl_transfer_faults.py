"""Updates by a trainer's tensors that fail or come at a bad time leave a server that answers with whole weights."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.background import Later
from support.patience import wait_until
from support.serving import Answer, Server, free_port, serving
from support.tiny_models import make_model, reference_greedy
from support.trainer import read_line, send_line, trainer, update_info, weights
from tok_core.engine import weight_transfer

PROMPT = [5, 6, 7, 8, 9]
ASKED = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def rl_server(tiny_model: Path) -> Iterator[Server]:
    with serving(tiny_model, enable_rl=True, engine_options={"enable_sleep_mode": True}) as running:
        yield running


@pytest.fixture(scope="module")
def new_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("new") / "new", seed=1)


@pytest.fixture
def restored(rl_server: Server, tiny_model: Path) -> Iterator[Server]:
    """Return the server; afterwards it is awake, is not paused and has its first weights."""
    yield rl_server
    for path, body in (("/wake_up", None), ("/resume", None), ("/update_weights", {"weight_dir": str(tiny_model)})):
        assert post(rl_server, path, body).status == 200


def post(server: Server, path: str, body: object = None) -> Answer:
    return server.call("POST", path, body)


def tokens(server: Server, **fields: object) -> list[int]:
    found: list[int] = server.complete(**ASKED | fields).json()["choices"][0]["token_ids"]  # type: ignore[index]
    return found


def expected(path: Path, count: int = 8) -> list[int]:
    return reference_greedy(path, [PROMPT], count)[0][0]


def group_at(port: int) -> dict[str, object]:
    return {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}


def join(server: Server, port: int) -> Answer:
    return post(server, "/init_weight_transfer_engine", {"init_info": group_at(port)})


def test_a_second_trainer_waits_for_the_first_one_and_may_follow_its_death(
    restored: Server, new_model: Path, tiny_model: Path
) -> None:
    server, info = restored, {"update_info": update_info(weights(new_model))}
    first_port = free_port()
    with trainer(first_port, 2, new_model, stall=4) as first, ThreadPoolExecutor(2) as pool:
        assert join(server, first_port).status == 200
        assert read_line(first) == "joined"
        second_port = free_port()
        with trainer(second_port, 2, new_model) as second:
            assert post(server, "/start_weight_update").status == 200
            send_line(first)
            update = pool.submit(post, server, "/update_weights", info)
            assert read_line(first) == "stalled"
            joined = pool.submit(join, server, second_port)
            first.kill()
            assert update.result(timeout=60).status == 400
            assert joined.result(timeout=60).status == 200
            assert read_line(second) == "joined"
            assert tokens(server) == expected(tiny_model)
            assert post(server, "/start_weight_update").status == 200
            send_line(second)
            assert post(server, "/update_weights", info).status == 200
            assert post(server, "/finish_weight_update").status == 200
    assert tokens(server) == expected(new_model)


def test_a_client_that_gives_up_no_longer_waits_for_its_trainer(
    restored: Server, new_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, port, ends = restored, free_port(), list[str]()
    wait_for_store = weight_transfer._wait_for_store

    def wait(*arguments: Any) -> None:
        ends.append("begun")
        try:
            wait_for_store(*arguments)
        finally:
            ends.append("ended")

    monkeypatch.setattr(weight_transfer, "_wait_for_store", wait)
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("POST", "/init_weight_transfer_engine", json.dumps({"init_info": group_at(port)}))
    wait_until(lambda: ends == ["begun"])
    connection.close()
    wait_until(lambda: ends == ["begun", "ended"])
    with trainer(port, 2, new_model) as process:
        assert join(server, port).status == 200
        assert read_line(process) == "joined"
        send_line(process)
        assert post(server, "/update_weights", {"update_info": update_info(weights(new_model))}).status == 200
    assert tokens(server) == expected(new_model)


def test_second_session_drops_the_tensors_of_the_first_with_a_warning(
    restored: Server, new_model: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server, info, port = restored, {"update_info": update_info(weights(new_model))}, free_port()
    with trainer(port, 2, new_model) as process:
        assert join(server, port).status == 200
        assert post(server, "/start_weight_update").status == 200
        send_line(process)
        assert post(server, "/update_weights", info).status == 200
        assert "drops the tensors" not in caplog.text
        assert post(server, "/start_weight_update").status == 200
        assert "drops the tensors received for one that was not finished" in caplog.text
        assert post(server, "/finish_weight_update").status == 200
        assert post(server, "/finish_weight_update").status == 400
    assert tokens(server) == expected(tiny_model)


def test_a_tensor_that_does_not_fit_leaves_paused_requests_their_weights(
    restored: Server, new_model: Path, tiny_model: Path
) -> None:
    server, port, before = restored, free_port(), restored.engine.stats()["output_tokens"]
    info = update_info(weights(new_model))
    info["shapes"][info["names"].index(DOWN)] = [128, 64]
    running = Later(lambda: server.complete(**ASKED | {"max_tokens": 200}))
    wait_until(lambda: server.engine.stats()["output_tokens"] > before + 5)
    with trainer(port, 2, new_model) as process:
        assert post(server, "/pause?mode=keep").status == 200
        assert join(server, port).status == 200
        assert post(server, "/start_weight_update").status == 200
        send_line(process)
        answer = post(server, "/update_weights", {"update_info": info})
        assert (answer.status, answer.error()["code"]) == (400, "weights_refused")
        assert DOWN in str(answer.error()["message"])
        assert post(server, "/finish_weight_update").status == 400
        assert post(server, "/resume").status == 200
    choice = running.answer().json()["choices"][0]  # type: ignore[index]
    assert choice["token_ids"] == expected(tiny_model, 200)
    assert tokens(server) == expected(tiny_model)


@pytest.mark.parametrize("level", [1, 2])
def test_tensors_that_come_while_the_weights_sleep_are_refused(
    restored: Server, new_model: Path, tiny_model: Path, level: int
) -> None:
    server, info, port = restored, {"update_info": update_info(weights(new_model))}, free_port()
    with trainer(port, 2, *[new_model] * 3) as process:
        assert join(server, port).status == 200
        assert post(server, f"/sleep?level={level}").status == 200
        send_line(process)
        answer = post(server, "/update_weights", info)
        assert (answer.status, answer.error()["param"]) == (400, "update_info")
        assert 'wake_up(["weights"])' in str(answer.error()["message"])
        assert post(server, "/start_weight_update").status == 200
        send_line(process)
        assert post(server, "/update_weights", info).status == 200
        answer = post(server, "/finish_weight_update")
        assert (answer.status, answer.error()["param"]) == (400, "update_info")
        assert post(server, "/wake_up").status == 200
        assert tokens(server) == expected(tiny_model)
        send_line(process)
        assert post(server, "/update_weights", info).status == 200
    assert tokens(server) == expected(new_model)
