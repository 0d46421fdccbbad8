"""Sleep and wake up over HTTP, with the wire formats of vLLM and SGLang; served only with --enable-rl."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from support.background import Later
from support.patience import wait_until
from support.paused_engine import held
from support.serving import Answer, Server, serving
from support.tiny_models import make_model, reference_greedy
from tok_client import AsyncClient, BadRequestError, Client

PROMPT = [5, 6, 7, 8, 9]
ASKED = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
LONG = {**ASKED, "max_tokens": 400}


@pytest.fixture(scope="module")
def sleepy_server(tiny_model: Path) -> Iterator[Server]:
    with serving(tiny_model, enable_rl=True, engine_options={"enable_sleep_mode": True}) as running:
        yield running


@pytest.fixture
def restored(sleepy_server: Server, tiny_model: Path) -> Iterator[Server]:
    """Return the server; afterwards it is awake, not paused, and has its first weights."""
    yield sleepy_server
    assert post(sleepy_server, "/wake_up").status == 200
    assert post(sleepy_server, "/resume").status == 200
    assert post(sleepy_server, "/update_weights", {"weight_dir": str(tiny_model)}).status == 200


@pytest.fixture(scope="module")
def new_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("new") / "new", seed=1)


def post(server: Server, path: str, body: object = None) -> Answer:
    return server.call("POST", path, body)


def is_sleeping(server: Server) -> object:
    return server.call("GET", "/is_sleeping").json()["is_sleeping"]


def tokens(answer: Answer) -> list[int]:
    found: list[int] = answer.json()["choices"][0]["token_ids"]  # type: ignore[index]
    return found


def expected(path: Path, count: int = 8) -> list[int]:
    return reference_greedy(path, [PROMPT], count)[0][0]


def start(server: Server, answers: list[Answer]) -> threading.Thread:
    """Send a long request in a thread, and return once it has made tokens."""
    before = server.engine.stats()["output_tokens"]
    thread = threading.Thread(target=lambda: answers.append(server.complete(**LONG)))
    thread.start()
    wait_until(lambda: server.engine.stats()["output_tokens"] > before + 5)
    return thread


@pytest.mark.parametrize("level", [1, 2])
def test_vllm_sleeps_and_wakes_up_as_a_whole(restored: Server, tiny_model: Path, level: int) -> None:
    assert tokens(restored.complete(**ASKED)) == expected(tiny_model)
    assert post(restored, f"/sleep?level={level}").json() == {"status": "asleep"}
    assert is_sleeping(restored) is True
    for path in ("/health", "/health_generate", "/ready"):
        assert restored.call("GET", path).status == 200
    assert post(restored, f"/sleep?level={level}").status == 200
    assert post(restored, "/wake_up").json() == {"status": "awake"}
    assert is_sleeping(restored) is False
    assert tokens(restored.complete(**ASKED)) == expected(tiny_model)


def test_vllm_updates_between_weights_and_kv_cache(restored: Server, new_model: Path) -> None:
    assert post(restored, "/sleep?level=2").status == 200
    late: list[Answer] = []
    thread = threading.Thread(target=lambda: late.append(restored.complete(**ASKED)))
    thread.start()
    wait_until(lambda: restored.engine.open_requests == 1)
    refused = post(restored, "/update_weights", {"weight_dir": str(new_model)})
    assert refused.status == 400
    assert refused.error()["param"] == "weight_dir"
    assert "the weights sleep" in str(refused.error()["message"])
    assert post(restored, "/wake_up?tags=weights").json() == {"status": "asleep"}
    assert post(restored, "/update_weights", {"weight_dir": str(new_model)}).status == 200
    assert not late
    assert post(restored, "/wake_up?tags=weights&tags=kv_cache").json() == {"status": "awake"}
    thread.join()
    assert tokens(late[0]) == expected(new_model)


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_mode_decides_what_happens_to_open_requests(restored: Server, tiny_model: Path, mode: str) -> None:
    answers: list[Answer] = []
    with held(restored.engine) if mode != "wait" else nullcontext():
        thread = start(restored, answers)
        assert post(restored, "/sleep" if mode == "abort" else f"/sleep?mode={mode}").status == 200
    assert restored.engine.open_requests == (mode == "keep")
    assert post(restored, "/wake_up").status == 200
    thread.join()
    found, wanted = tokens(answers[0]), expected(tiny_model, 400)
    assert found == wanted[: len(found)]
    assert (len(found) < 400) == (mode == "abort")


def test_resume_ends_a_sleep_that_waits(restored: Server, tiny_model: Path) -> None:
    answers: list[Answer] = []
    with held(restored.engine):
        thread = start(restored, answers)
        waiting = Later(lambda: post(restored, "/sleep?mode=wait"))
        wait_until(lambda: restored.engine._core._dispatcher.holding)
        assert post(restored, "/resume").status == 200
        answer = waiting.answer()
    assert (answer.status, answer.error()["code"]) == (400, "engine_resumed")
    assert not restored.engine.is_sleeping
    thread.join()
    assert tokens(answers[0]) == expected(tiny_model, 400)


def test_sglang_releases_and_resumes_memory(restored: Server, new_model: Path, tiny_model: Path) -> None:
    assert post(restored, "/release_memory_occupation").body == b"null"
    assert is_sleeping(restored) is True
    assert post(restored, "/resume_memory_occupation", {}).body == b"null"
    assert post(restored, "/release_memory_occupation", {"tags": []}).status == 200
    assert is_sleeping(restored) is True
    assert post(restored, "/resume_memory_occupation", {"tags": []}).status == 200
    assert is_sleeping(restored) is False
    assert tokens(restored.complete(**ASKED)) == expected(tiny_model)
    assert post(restored, "/release_memory_occupation", {"tags": ["kv_cache"]}).status == 200
    assert post(restored, "/release_memory_occupation", {"tags": ["weights"]}).status == 200
    assert post(restored, "/resume_memory_occupation", {"tags": ["weights"]}).status == 200
    assert post(restored, "/update_weights_from_disk", {"model_path": str(new_model)}).status == 200
    answer = post(restored, "/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
    assert answer.status == 200
    assert answer.headers["x-tok-ignored"] == "tags[1]"
    assert is_sleeping(restored) is False
    assert tokens(restored.complete(**ASKED)) == expected(new_model)


def test_sglang_releases_nothing_while_requests_run_unless_they_are_paused(restored: Server, tiny_model: Path) -> None:
    answers: list[Answer] = []
    with held(restored.engine):
        thread = start(restored, answers)
        refused = post(restored, "/release_memory_occupation")
        assert refused.status == 400
        assert refused.error()["code"] == "requests_open"
        assert is_sleeping(restored) is False
        assert post(restored, "/pause_generation", {"mode": "in_place"}).status == 200
    assert post(restored, "/release_memory_occupation").status == 200
    assert post(restored, "/continue_generation", {}).status == 200
    assert is_sleeping(restored) is True
    assert not answers
    assert post(restored, "/resume_memory_occupation").status == 200
    thread.join()
    assert tokens(answers[0]) == expected(tiny_model, 400)


async def test_the_client_sleeps_and_wakes_up(restored: Server, tiny_model: Path) -> None:
    with Client(restored.url) as client:
        assert client.rl.sleep().status == "asleep"
        assert client.rl.is_sleeping()
        assert client.rl.wake_up(["weights"]).status == "asleep"
        assert client.rl.wake_up(["weights", "kv_cache"]).status == "awake"
        assert not client.rl.is_sleeping()
        with pytest.raises(BadRequestError, match="level is 3; allowed: 1, 2"):
            client.rl.sleep(3)  # type: ignore[arg-type]
    async with AsyncClient(restored.url) as other:
        assert (await other.rl.sleep(2, mode="keep")).status == "asleep"
        assert await other.rl.is_sleeping()
        assert (await other.rl.wake_up()).status == "awake"
        assert not await other.rl.is_sleeping()
    assert tokens(restored.complete(**ASKED)) == expected(tiny_model)


@pytest.mark.parametrize(
    ("path", "body", "param", "allowed"),
    [
        ("/sleep?level=0", None, "level", "1, 2"),
        ("/sleep?level=deep", None, "level", "int"),
        ("/sleep?level=1&level=2", None, "level", "once"),
        ("/sleep?mode=soft", None, "mode", "keep"),
        ("/sleep?tags=weights", None, "tags", "level, mode"),
        ("/wake_up?tags=all", None, "tags", "weights, kv_cache"),
        ("/wake_up?tags=weights&tags=cuda_graph", None, "tags", "weights, kv_cache"),
        ("/release_memory_occupation", {"tags": "weights"}, "tags", "array"),
        ("/release_memory_occupation", {"tags": ["model"]}, "tags", "weights, kv_cache, cuda_graph"),
        ("/resume_memory_occupation", {"tags": [1]}, "tags[0]", "str"),
    ],
)
def test_bad_input_names_the_field_and_what_is_allowed(
    sleepy_server: Server, path: str, body: object, param: str, allowed: str
) -> None:
    answer = post(sleepy_server, path, body)
    assert answer.status == 400
    assert answer.error()["param"] == param
    assert allowed in str(answer.error()["message"])
    assert is_sleeping(sleepy_server) is False


def test_a_server_without_sleep_mode_names_the_flag(tiny_model: Path) -> None:
    with serving(tiny_model, enable_rl=True) as server:
        for path in ("/sleep", "/wake_up", "/release_memory_occupation", "/resume_memory_occupation"):
            answer = post(server, path)
            assert answer.status == 400, path
            assert answer.error()["code"] == "sleep_mode_not_enabled"
            assert "--enable-sleep-mode" in str(answer.error()["message"])
        assert is_sleeping(server) is False
