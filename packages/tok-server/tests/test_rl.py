"""Endpoints of trainers, with the wire formats of vLLM, prime-rl and SGLang; served only with --enable-rl."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.background import Later
from support.patience import wait_until
from support.paused_engine import held
from support.serving import Answer, Server, serving
from support.tiny_models import change_weights, make_model, reference_greedy
from tok_client import AsyncClient, BadRequestError, Client
from tok_server.rl import RL_OPERATIONS

PROMPT = [5, 6, 7, 8, 9]
ASKED = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
LONG = {**ASKED, "max_tokens": 400}
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


@contextmanager
def long_request(server: Server, **fields: object) -> Iterator[Later]:
    """Send a long request, and hold it in the middle of its answer until the engine gets the pause or the abort."""
    before = server.engine.stats()["output_tokens"]
    with held(server.engine):
        long = Later(lambda: server.complete(**LONG, **fields))
        wait_until(lambda: server.engine.stats()["output_tokens"] > before + 5)
        yield long


def tokens(answer: Answer) -> list[int]:
    choice = answer.json()["choices"][0]  # type: ignore[index]
    found: list[int] = choice["token_ids"]
    return found


def expected(path: Path, count: int = 8) -> list[int]:
    return reference_greedy(path, [PROMPT], count)[0][0]


@pytest.mark.parametrize("operation", RL_OPERATIONS, ids=lambda one: f"{one.method} {one.path}")
def test_endpoints_of_trainers_are_forbidden_without_the_flag(server: Server, operation: object) -> None:
    method, path = operation.method, operation.path  # type: ignore[attr-defined]
    answer = server.call(method, path)
    assert answer.status == 403
    assert answer.error()["message"] == f"{method} {path} is served only with --enable-rl"
    assert answer.error()["code"] == "rl_not_enabled"


def test_endpoints_of_trainers_need_the_api_key(tiny_model: Path) -> None:
    with serving(tiny_model, enable_rl=True, api_key="secret") as server:
        for operation in RL_OPERATIONS:
            assert server.call(operation.method, operation.path).status == 401, operation.path
        assert server.call("GET", "/is_paused", None, {"Authorization": "Bearer secret"}).json() == {"is_paused": False}


def test_prime_rl_pauses_updates_and_resumes(restored: Server, new_model: Path, tiny_model: Path) -> None:
    server = restored
    assert tokens(server.complete(**ASKED)) == expected(tiny_model)
    assert post(server, "/pause?mode=keep&clear_cache=false").json() == {"status": "paused"}
    assert server.call("GET", "/is_paused").json() == {"is_paused": True}
    late = Later(lambda: server.complete(**ASKED))
    wait_until(lambda: server.engine.open_requests == 1)
    answer = post(server, "/update_weights", {"weight_dir": str(new_model)})
    assert (answer.status, answer.json()) == (200, {"status": "ok"})
    assert server.engine.is_paused
    assert not late.answers
    assert post(server, "/resume").json() == {"status": "resumed"}
    assert tokens(late.answer()) == expected(new_model)
    assert server.call("GET", "/is_paused").json() == {"is_paused": False}


async def test_the_client_pauses_updates_and_resumes(restored: Server, new_model: Path, tiny_model: Path) -> None:
    with Client(restored.url) as client:
        assert client.rl.pause("keep", clear_cache=True).status == "paused"
        assert client.rl.is_paused()
        assert client.rl.update_weights(new_model, weight_version="a").status == "ok"
        assert client.rl.weight_version() == "a"
        assert client.rl.reset_prefix_cache().success
        assert client.rl.resume().status == "resumed"
        assert not client.rl.is_paused()
        with pytest.raises(BadRequestError, match="weight_dir is '/nowhere'"):
            client.rl.update_weights("/nowhere")
    assert tokens(restored.complete(**ASKED)) == expected(new_model)
    async with AsyncClient(restored.url) as other:
        assert (await other.rl.pause()).status == "paused"
        assert await other.rl.is_paused()
        assert (await other.rl.update_weights(tiny_model, weight_version="b")).status == "ok"
        assert await other.rl.weight_version() == "b"
        assert (await other.rl.reset_prefix_cache()).success
        assert (await other.rl.resume()).status == "resumed"
    assert tokens(restored.complete(**ASKED)) == expected(tiny_model)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/pause", "/pause?mode=abort&clear_cache=true", "/pause_generation"])
def test_aborted_requests_are_answered_with_their_tokens(restored: Server, path: str, stream: bool) -> None:
    server = restored
    with long_request(server, stream=stream) as long:
        assert post(server, path).status == 200
    answer = long.answer()
    assert answer.status == 200
    chunks = answer.chunks() if stream else [answer.json()]
    choices = [chunk["choices"][0] for chunk in chunks]  # type: ignore[index]
    assert choices[-1]["finish_reason"] == "abort"
    found = [token for choice in choices for token in choice.get("token_ids") or ()]
    assert 5 < len(found) < 400
    assert post(server, "/resume").status == 200
    assert tokens(server.complete(**LONG))[: len(found)] == found


def test_pause_waits_for_running_requests(restored: Server) -> None:
    server, before = restored, restored.engine.stats()["output_tokens"]
    long = Later(lambda: server.complete(**LONG))
    wait_until(lambda: server.engine.stats()["output_tokens"] > before + 5)
    assert post(server, "/pause?wait_for_inflight_requests=true").status == 200
    assert len(tokens(long.answer())) == 400


def test_resume_ends_a_pause_that_waits(restored: Server, tiny_model: Path) -> None:
    with long_request(restored) as long:
        waiting = Later(lambda: post(restored, "/pause?mode=wait"))
        wait_until(lambda: restored.engine._core._dispatcher.holding)
        assert post(restored, "/resume").status == 200
        answer = waiting.answer()
    assert (answer.status, answer.error()["code"]) == (400, "engine_resumed")
    assert tokens(long.answer()) == expected(tiny_model, 400)


def test_sglang_pauses_in_place_updates_from_disk_and_continues(restored: Server, new_model: Path) -> None:
    server = restored
    with long_request(server) as long:
        answer = post(server, "/pause_generation", {"mode": "in_place"})
    assert answer.json() == {"message": "generation is paused", "status": "ok"}
    body = {"model_path": str(new_model), "weight_version": "step-3", "keep_pause": True, "is_async": False}
    answer = post(server, "/update_weights_from_disk", body)
    found = answer.json()
    assert (answer.status, found["success"], found["num_paused_requests"]) == (200, True, 1)
    assert "is_async" in answer.headers["x-tok-ignored"]
    assert server.engine.is_paused
    assert server.call("GET", "/get_weight_version").json() == {"weight_version": "step-3"}
    assert server.call("GET", "/health_generate").status == 200
    assert post(server, "/continue_generation", {}).json() == {"message": "generation continues", "status": "ok"}
    assert len(tokens(long.answer())) == 400
    assert server.call("GET", "/health_generate").status == 200
    assert tokens(server.complete(**ASKED)) == expected(new_model)


def test_update_from_disk_resumes_unless_asked_not_to(restored: Server, new_model: Path) -> None:
    server = restored
    body = {"model_path": str(new_model), "abort_all_requests": True, "load_format": None}
    with long_request(server) as long:
        assert post(server, "/update_weights_from_disk", body).json()["success"] is True
    assert long.answer().json()["choices"][0]["finish_reason"] == "abort"  # type: ignore[index]
    assert not server.engine.is_paused
    assert tokens(server.complete(**ASKED)) == expected(new_model)


def test_refused_weights_leave_the_old_ones(
    restored: Server, new_model: Path, tiny_model: Path, tmp_path: Path
) -> None:
    server, broken = restored, make_model("llama", tmp_path / "broken", seed=1)
    change_weights(broken, lambda weights: weights.pop(DOWN))
    answer = post(server, "/update_weights", {"weight_dir": str(broken)})
    assert answer.status == 400
    assert answer.error()["param"] == "weight_dir"
    assert answer.error()["code"] == "weights_refused"
    assert DOWN in str(answer.error()["message"])
    answer = post(server, "/update_weights_from_disk", {"model_path": str(broken), "keep_pause": True})
    assert (answer.status, answer.json()["success"]) == (400, False)
    assert DOWN in str(answer.json()["message"])
    assert tokens(server.complete(**ASKED)) == expected(tiny_model)
    assert not server.engine.is_paused


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/flush_cache", "GET /flush_cache"])
def test_prefix_cache_is_forgotten(restored: Server, path: str) -> None:
    method, _, path = path.rpartition(" ")
    asked = {**ASKED, "prompt": list(range(100, 164))}

    def cached() -> int:
        details = restored.complete(**asked).json()["usage"]["prompt_tokens_details"]  # type: ignore[index]
        found: int = details["cached_tokens"]
        return found

    cached()
    assert cached() == 48
    answer = restored.call(method or "POST", path)
    assert answer.status == 200
    assert answer.json() == {"success": True} if path == "/reset_prefix_cache" else answer.body == b"Cache flushed.\n"
    assert cached() == 0


def test_all_requests_are_aborted_without_a_pause(restored: Server) -> None:
    server = restored
    with long_request(server) as long:
        assert post(server, "/abort_request", {"abort_all": True}).status == 200
    assert long.answer().json()["choices"][0]["finish_reason"] == "abort"  # type: ignore[index]
    assert not server.engine.is_paused


def test_server_reports_its_size_and_model(rl_server: Server) -> None:
    assert rl_server.call("GET", "/get_world_size").json() == {"world_size": 1}
    assert rl_server.call("GET", "/get_world_size?include_dp=False").json() == {"world_size": 1}
    info = rl_server.call("GET", "/server_info?config_format=json").json()
    assert info == rl_server.call("GET", "/server_info").json()
    assert (info["tp_size"], info["dp_size"], info["served_model_name"]) == (1, 1, "tiny")
    model = info["vllm_config"]["model_config"]  # type: ignore[index]
    assert model["dtype"] == "torch.float32"
    assert model["max_model_len"] == rl_server.engine.info.max_model_len


@pytest.mark.parametrize(
    ("path", "body", "param", "allowed"),
    [
        ("/pause?mode=soft", None, "mode", "keep"),
        ("/pause?clear_cache=perhaps", None, "clear_cache", "true, false"),
        ("/pause?level=1", None, "level", "clear_cache"),
        ("/update_weights", {}, "weight_dir", "weight_dir"),
        ("/update_weights", {"weight_dir": None}, "weight_dir", "str"),
        ("/update_weights", {"weight_dir": "/nowhere"}, "weight_dir", "a directory"),
        ("/update_weights", {"weight_dir": "a\0b"}, "weight_dir", "a directory"),
        ("/update_weights", {"weight_dir": ""}, "weight_dir", "a directory"),
        ("/update_weights", {"weight_dir": "a" * 5000}, "weight_dir", "a directory"),
        ("/update_weights", {"weight_dir": "/", "weight_version": ""}, "weight_version", "at least one"),
        ("/update_weights", {"weight_dir": "/", "weight_version": 3}, "weight_version", "str"),
        ("/reset_prefix_cache?reset_running_requests=true", None, "reset_running_requests", "false"),
        ("/pause_generation", {"mode": "soft"}, "mode", "retract"),
        ("/update_weights_from_disk", {"model_path": "/", "flush_cache": False}, "flush_cache", "true"),
        ("/update_weights_from_disk", {"model_path": "/", "load_format": "dummy"}, "load_format", "safetensors"),
        ("/abort_request", {}, "abort_all", "true"),
    ],
)
def test_bad_input_names_the_field_and_what_is_allowed(
    rl_server: Server, path: str, body: object, param: str, allowed: str
) -> None:
    answer = post(rl_server, path, body)
    assert answer.status == 400
    assert answer.error()["param"] == param
    assert allowed in str(answer.error()["message"])
    assert not rl_server.engine.is_paused
