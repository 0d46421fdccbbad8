"""Weights that a trainer in another process broadcasts reach every worker or none; its death leaves the old ones."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from support.engines import cpu_engine, manager_of, random_prompts
from support.forked_children import ForkedChild
from support.patience import wait_until
from support.serving import free_port
from support.tiny_models import change_weights, make_model, reference_greedy
from support.trainer import announce, read_line, send_line, trainer, weights
from tok_core import Engine, EngineClosed, EngineConfig, InvalidField, ModelError, SamplingParams
from tok_core.engine import weight_transfer
from tok_core.worker.transfer import trainer_group

pytestmark = pytest.mark.usefixtures("forked_children")

PROMPTS = random_prompts((5, 33, 64))
NEW = 8
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
DOWN = "model.layers.1.mlp.down_proj.weight"
SETTINGS: dict[str, Any] = {"kv_cache_tokens": 4096, "max_running": 48, "dtype": "float32", "device": "cpu"}


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("qwen2", tmp_path_factory.mktemp("old") / "model", layers=4)


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("qwen2", tmp_path_factory.mktemp("new") / "model", layers=4, seed=1, shards=2)


def runner_of(engine: Engine) -> Any:
    return manager_of(engine).ports._runner  # type: ignore[attr-defined]


def tokens(engine: Engine) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in engine.generate(PROMPTS, GREEDY)]


def expected(path: Path) -> list[list[int]]:
    return [ids for ids, _ in reference_greedy(path, PROMPTS, NEW)]


@pytest.mark.parametrize("options", [{}, {"tp": 2}, {"pp": 2}, {"dp": 2}], ids=["one worker", "tp 2", "pp 2", "dp 2"])
@pytest.mark.parametrize("bucket", [0, 20_000])
def test_all_workers_get_what_the_trainer_broadcasts(
    old: Path, new: Path, options: dict[str, Any], bucket: int
) -> None:
    workers, port = 2 if options else 1, free_port()
    with Engine(EngineConfig(model=str(old), **SETTINGS, **options)) as engine:
        transfer = engine.weight_transfer
        with trainer(port, workers + 1, new, old, bucket_bytes=bucket) as process:
            transfer.join("127.0.0.1", port, rank_offset=1, world_size=workers + 1)
            assert read_line(process) == "joined"
            assert tokens(engine) == expected(old)
            send_line(process)
            transfer.receive(**announce(new), bucket_bytes=bucket)
            assert engine.weight_version == "1"
            outputs = engine.generate(PROMPTS, GREEDY)
            assert [output.outputs[0].token_ids for output in outputs] == expected(new)
            assert [output.cached_tokens for output in outputs] == [0] * len(PROMPTS)
            transfer.start()
            send_line(process)
            transfer.receive(**announce(old), bucket_bytes=bucket)
            assert tokens(engine) == expected(new)  # staged only
            transfer.finish("step-2")
            assert tokens(engine) == expected(old)
            assert engine.weight_version == "step-2"
        assert engine.stats()["restarts"] == 0


def kill_when_stalled(process: ForkedChild) -> None:
    assert read_line(process) == "stalled"
    process.kill()


@pytest.mark.parametrize("options", [{}, {"tp": 2}], ids=["one worker", "tp 2"])
def test_killed_trainer_leaves_the_old_weights_and_another_may_follow(
    old: Path, new: Path, options: dict[str, Any]
) -> None:
    workers = options.get("tp", 1)
    with Engine(EngineConfig(model=str(old), **SETTINGS, **options)) as engine:
        transfer, port = engine.weight_transfer, free_port()
        with trainer(port, workers + 1, new, stall=7) as process:
            transfer.join("127.0.0.1", port, rank_offset=1, world_size=workers + 1)
            assert read_line(process) == "joined"
            transfer.start()
            send_line(process)
            killer = threading.Thread(target=kill_when_stalled, args=(process,))
            killer.start()
            with pytest.raises(ModelError, match="trainer"):
                transfer.receive(**announce(new))
            killer.join()
        with pytest.raises(ModelError, match="the update has failed"):
            transfer.finish()
        assert tokens(engine) == expected(old)
        assert engine.weight_version == "default"
        with pytest.raises(ModelError, match="closed"):
            transfer.receive(**announce(new))
        port = free_port()
        with trainer(port, workers + 1, new) as process:
            transfer.join("127.0.0.1", port, rank_offset=1, world_size=workers + 1)
            send_line(process)
            transfer.receive(**announce(new))
        assert tokens(engine) == expected(new)
        assert engine.stats()["restarts"] == 0


def test_groups_of_ended_trainers_keep_no_connections(old: Path) -> None:
    files = []
    with cpu_engine(old) as engine:
        for number in range(4):
            port, name = free_port(), f"group-{number}"
            with trainer(port, 2, group=name) as process:
                engine.weight_transfer.join("127.0.0.1", port, rank_offset=1, world_size=2, name=name)
                assert read_line(process) == "joined"
                files.append(psutil.Process().num_fds())
            wait_until(runner_of(engine)._receiver._groups[name].lost.is_set)
    # The first trainer's process starts a fork server. The group that has ended last is closed at the next join.
    assert files[2] == files[3], files


def rename(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.9.mlp.down_proj.weight"] = tensors.pop(DOWN)


def reshape(tensors: dict[str, Tensor]) -> None:
    tensors[DOWN] = tensors[DOWN].reshape(128, 64)


def cast(tensors: dict[str, Tensor]) -> None:
    tensors[DOWN] = tensors[DOWN].view(torch.float64)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (rename, "layers.9.mlp.down_proj.weight .* has no place"),
        (reshape, rf"{DOWN} has shape \[128, 64\]; expected \[64, 128\]"),
        (cast, rf"{DOWN} has (shape|dtype)"),
    ],
    ids=["name", "shape", "dtype"],
)
def test_an_update_after_a_refused_one_uses_the_same_group(
    old: Path, new: Path, break_it: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    with cpu_engine(old) as engine:
        transfer, port = engine.weight_transfer, free_port()
        with trainer(port, 2, new, new) as process:
            transfer.join("127.0.0.1", port, rank_offset=1, world_size=2)
            wrong = announce(new, break_it)
            if break_it is rename:  # keep the order of the broadcasts
                wrong = announce(new)
                wrong["names"] = [name.replace(DOWN, DOWN.replace("layers.1", "layers.9")) for name in wrong["names"]]
            send_line(process)
            with pytest.raises(ModelError, match=message):
                transfer.receive(**wrong)
            assert tokens(engine) == expected(old)
            send_line(process)
            transfer.receive(**announce(new))
            assert tokens(engine) == expected(new)


def test_numbers_that_the_model_cannot_hold_are_refused(old: Path, new: Path, tmp_path: Path) -> None:
    broken = make_model("qwen2", tmp_path / "broken", layers=4, seed=1)
    change_weights(broken, lambda tensors: tensors[DOWN].fill_(float("nan")))
    with cpu_engine(old, quantization="fp8") as engine, cpu_engine(new, quantization="fp8") as reference:
        transfer, port, before = engine.weight_transfer, free_port(), tokens(engine)
        with trainer(port, 2, broken, new) as process:
            transfer.join("127.0.0.1", port, rank_offset=1, world_size=2)
            send_line(process)
            with pytest.raises(ModelError, match=DOWN):
                transfer.receive(**announce(broken))
            assert tokens(engine) == before
            send_line(process)
            transfer.receive(**announce(new))
            assert tokens(engine) == tokens(reference) != before


def test_tensors_that_an_update_leaves_out_stay(old: Path, tmp_path: Path) -> None:
    """A projection leaves float16's range, and its layer's others, which are not sent, keep their values."""

    def enlarge(tensors: dict[str, Tensor]) -> None:
        tensors[DOWN] *= -1
        tensors["model.layers.0.self_attn.q_proj.weight"] *= 1e5

    mixed = make_model("qwen2", tmp_path / "mixed", layers=4)
    change_weights(mixed, enlarge)
    sent = tmp_path / "sent"
    sent.mkdir()
    names = (DOWN, "model.layers.0.self_attn.q_proj.weight")
    save_file({name: weights(mixed)[name] for name in names}, sent / "model.safetensors")
    options = {"dtype": "bfloat16"}
    with cpu_engine(old, **options) as engine, cpu_engine(mixed, **options) as reference:
        transfer, port = engine.weight_transfer, free_port()
        with trainer(port, 2, sent) as process:
            transfer.join("127.0.0.1", port, rank_offset=1, world_size=2)
            send_line(process)
            transfer.receive(**announce(sent))
        found, wanted = (dict(runner_of(one).model.named_parameters()) for one in (engine, reference))
        for name, parameter in wanted.items():
            assert found[name].dtype == parameter.dtype, name
            torch.testing.assert_close(found[name], parameter, msg=name)  # some were float16 before


def test_a_tied_models_head_is_its_embedding(tmp_path: Path) -> None:
    old, new = (make_model("llama", tmp_path / str(seed), seed=seed) for seed in (0, 1))
    with cpu_engine(old) as engine:
        assert "lm_head.weight" not in weights(new)
        transfer, port = engine.weight_transfer, free_port()
        other = tmp_path / "other"
        other.mkdir()
        sent = weights(new)
        save_file({**sent, "lm_head.weight": sent["model.embed_tokens.weight"] * 2}, other / "model.safetensors")
        same = tmp_path / "same"
        same.mkdir()
        save_file({**sent, "lm_head.weight": sent["model.embed_tokens.weight"].clone()}, same / "model.safetensors")
        with trainer(port, 2, other, same) as process:
            transfer.join("127.0.0.1", port, rank_offset=1, world_size=2)
            send_line(process)
            with pytest.raises(ModelError, match="differs from"):
                transfer.receive(**announce(other))
            assert tokens(engine) == expected(old)
            send_line(process)
            transfer.receive(**announce(same))
            assert tokens(engine) == expected(new)


def test_tensors_held_in_a_pause_are_applied_when_complete_or_at_resume(old: Path, new: Path) -> None:
    with cpu_engine(old) as engine:
        transfer, port = engine.weight_transfer, free_port()
        whole = announce(new)
        first = {key: value[:9] for key, value in whole.items()}
        rest = {key: value[9:] for key, value in whole.items()}
        with trainer(port, 2, new, old, new, stall=2 * len(whole["names"]) + 9) as process:
            transfer.join("127.0.0.1", port, rank_offset=1, world_size=2, name="weight_transfer")
            engine.pause()
            send_line(process)
            transfer.receive(**first, hold=True)
            assert engine.weight_version == "default"
            transfer.receive(**rest, hold=True, version="a")
            assert engine.weight_version == "a"
            engine.resume()
            assert tokens(engine) == expected(new)
            engine.pause()
            send_line(process)
            transfer.receive(**announce(old), hold=True)
            engine.resume()
            assert tokens(engine) == expected(old)
            engine.pause()
            send_line(process)
            transfer.receive(**first, hold=True)
            process.kill()
            process.wait()
            wait_until(lambda: _lost(engine))
            with pytest.raises(ModelError, match="trainer"):
                engine.resume()
            assert not engine.is_paused
            assert tokens(engine) == expected(old)


def _lost(engine: Engine) -> bool:
    """Return whether the worker has noticed that its trainer has ended."""
    groups = runner_of(engine)._receiver._groups
    return not any(group.is_open for group in groups.values())


def test_replica_restarted_after_a_trainers_update_waits_for_the_next(old: Path, new: Path, tmp_path: Path) -> None:
    third = make_model("qwen2", tmp_path / "third", layers=4, seed=2)
    port, info, prompts = free_port(), announce(new), random_prompts((20,) * 16, seed=1)
    with Engine(EngineConfig(model=str(old), **SETTINGS, dp=2)) as engine:
        transfer = engine.weight_transfer
        with trainer(port, 3, new) as process:
            transfer.join("127.0.0.1", port, rank_offset=1, world_size=3)
            send_line(process)
            transfer.receive(**info)
        replica: Any = engine._core._replica_set.records[0].replica
        os.kill(replica.children["worker"].pid, signal.SIGKILL)
        wait_until(lambda: engine.stats()["restarts"] == 1 and engine.health().replicas[0].state == "ready")
        engine.pause()
        engine.resume()
        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(engine.generate, prompts, GREEDY)
            wait_until(lambda: 0 < engine.open_requests < len(prompts))  # the other replica has answered some
            assert not answers.done()
            engine.update_weights(str(third))
            outputs = [output.outputs[0] for output in answers.result(timeout=60)]
        with pytest.raises(ModelError, match=r"in no group|closed|has ended"):
            transfer.receive(**info)
    by_new, by_third = ([ids for ids, _ in reference_greedy(path, prompts, NEW)] for path in (new, third))
    sources = [
        "both" if output.weight_spans else "new" if output.token_ids == was else "third"
        for output, was in zip(outputs, by_new, strict=True)
    ]
    assert {"new", "third"} <= set(sources)
    for source, output, now in zip(sources, outputs, by_third, strict=True):
        assert source != "third" or output.token_ids == now


def test_an_update_during_which_a_replica_restarts_is_not_applied(old: Path, new: Path) -> None:
    port = free_port()
    with Engine(EngineConfig(model=str(old), **SETTINGS)) as engine:
        transfer = engine.weight_transfer
        with trainer(port, 2, new) as process:
            transfer.join("127.0.0.1", port, rank_offset=1, world_size=2)
            transfer.start()
            send_line(process)
            transfer.receive(**announce(new))
        replica: Any = engine._core._replica_set.records[0].replica
        os.kill(replica.children["worker"].pid, signal.SIGKILL)
        wait_until(lambda: engine.stats()["restarts"] == 1 and engine.health().replicas[0].state == "ready")
        with pytest.raises(ModelError, match="restarted during the update"):
            transfer.finish()
        assert tokens(engine) == expected(old)
        assert engine.weight_version == "default"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("address", 5), ("port", "29500"), ("port", 1 << 16), ("rank_offset", "1"), ("world_size", 2.0)),
        *(("name", 5), ("protocol", "nccl"), ("bucket_bytes", "1"), ("world_size", 1 << 40)),
    ],
)
def test_groups_of_wrong_values_are_refused_by_field(old: Path, field: str, value: object) -> None:
    cancelled = threading.Event()
    cancelled.set()  # ends a wait for a trainer
    wanted: dict[str, Any] = {"address": "127.0.0.1", "port": 1, "rank_offset": 1, "world_size": 2, field: value}
    with cpu_engine(old) as engine, pytest.raises(InvalidField, match=f"{field} is {value!r}; allowed: "):
        engine.weight_transfer.join(**wanted, cancelled=cancelled)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("names", [5]), ("shapes", [["64"]]), ("shapes", [[64.0]]), ("shapes", [[1 << 63]])),
        ("shapes", [[1 << 62, 8]]),
        *(("group", 5), ("bucket_bytes", 1.5), ("version", 7)),
    ],
)
def test_tensors_of_wrong_values_are_refused_by_field(old: Path, field: str, value: object) -> None:
    wanted: dict[str, Any] = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[64]], field: value}
    with cpu_engine(old) as engine, pytest.raises(InvalidField, match=rf"^{field} (is|has) .*; allowed: "):
        engine.weight_transfer.receive(**wanted)


@pytest.mark.parametrize("bucket", [0, 1])
def test_a_broadcast_that_memory_cannot_hold_is_refused_with_its_tensor(old: Path, new: Path, bucket: int) -> None:
    with cpu_engine(old) as engine:
        transfer, port = engine.weight_transfer, free_port()
        with trainer(port, 2, new) as process:
            transfer.join("127.0.0.1", port, rank_offset=1, world_size=2)
            send_line(process)
            message = r"norm.weight has shape .* expected \[64\]; a broadcast of 4503599627370496 bytes does not fit"
            with pytest.raises(ModelError, match=message):
                transfer.receive(["model.norm.weight"], ["float32"], [[1 << 50]], bucket_bytes=bucket)
            assert tokens(engine) == expected(old)


def test_groups_and_sessions_are_refused_by_field(old: Path, new: Path) -> None:
    with cpu_engine(old) as engine:
        transfer = engine.weight_transfer
        with pytest.raises(InvalidField, match="world_size"):
            transfer.join("127.0.0.1", 1, rank_offset=1, world_size=1)
        with pytest.raises(InvalidField, match="rank_offset"):
            transfer.join("127.0.0.1", 1, rank_offset=0, world_size=2)
        with pytest.raises(InvalidField, match="group_name"):
            transfer.receive(**announce(new))
        with pytest.raises(InvalidField, match="group_name"):
            transfer.leave("other")
        with pytest.raises(InvalidField, match="finish"):
            transfer.finish()
        with pytest.raises(ModelError, match="CPU"):
            transfer.receive(**announce(new), handles=[{}] * len(announce(new)["names"]))


def test_a_trainer_at_an_unknown_host_is_refused_at_once(old: Path) -> None:
    with cpu_engine(old) as engine:
        with pytest.raises(ModelError, match=r"at no\.such\.host\.invalid:1: the trainer cannot be reached: .*[Nn]ame"):
            engine.weight_transfer.join("no.such.host.invalid", 1, rank_offset=1, world_size=2)
        assert tokens(engine) == expected(old)


def test_requests_run_while_the_trainer_does_not_listen_yet(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, waits, may_go_on = [0.0], threading.Event(), threading.Event()

    def sleep(_seconds: float) -> None:
        waits.set()
        assert may_go_on.wait(60)

    monkeypatch.setattr(weight_transfer, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    with cpu_engine(old) as engine, ThreadPoolExecutor() as pool:
        port = free_port()
        join = pool.submit(engine.weight_transfer.join, "127.0.0.1", port, rank_offset=1, world_size=2)
        assert waits.wait(60)
        assert tokens(engine) == expected(old)
        assert not join.done()
        now[0] = weight_transfer.JOIN_TIMEOUT_SECONDS + 1
        may_go_on.set()
        with pytest.raises(ModelError, match=rf"at 127\.0\.0\.1:{port}: the trainer cannot be reached"):
            join.result(60)


def test_waiting_for_a_trainer_ends_if_cancelled_or_with_the_engine(old: Path) -> None:
    with ThreadPoolExecutor() as pool:
        with cpu_engine(old) as engine:
            cancelled, port = threading.Event(), free_port()
            waiting, other = (
                pool.submit(engine.weight_transfer.join, "127.0.0.1", port, rank_offset=1, world_size=2, cancelled=one)
                for one in (cancelled, None)
            )
            cancelled.set()
            with pytest.raises(ModelError, match=rf"at 127\.0\.0\.1:{port}: the wait for the trainer was cancelled"):
                waiting.result(60)
            assert not other.done()
        with pytest.raises(EngineClosed):
            other.result(60)


def test_a_port_at_which_no_store_answers_is_refused(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_group, "HANDSHAKE_TIMEOUT", timedelta(seconds=1))
    with cpu_engine(old) as engine, socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(ModelError, match=r"at 127\.0\.0\.1:\d+: no progress within 0:00:01"):
            engine.weight_transfer.join(*silent.getsockname(), rank_offset=1, world_size=2)
        assert tokens(engine) == expected(old)


@pytest.mark.parametrize(("trainers", "engines"), [(2, 3), (3, 2)])
def test_a_group_of_another_size_than_the_trainers_is_refused_with_a_hint(
    old: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, trainers: int, engines: int
) -> None:
    monkeypatch.setattr(trainer_group, "TIMEOUT", timedelta(seconds=2))
    monkeypatch.setattr(weight_transfer, "JOIN_WARNING_SECONDS", 0.5)
    port = free_port()
    with cpu_engine(old) as engine, trainer(port, trainers, old):
        with pytest.raises(ModelError, match=rf"not all ranks have .*world_size is {engines}; .* within 0:00:02"):
            engine.weight_transfer.join("127.0.0.1", port, rank_offset=1, world_size=engines)
        assert f"waits for all ranks (world_size is {engines}); no request is computed meanwhile" in caplog.text
        assert tokens(engine) == expected(old)


def test_dropped_tensors_of_a_trainer_are_restored_by_a_complete_update(old: Path, new: Path) -> None:
    port = free_port()
    with cpu_engine(old, enable_sleep_mode=True) as engine, trainer(port, 2, new, new) as process:
        transfer = engine.weight_transfer
        transfer.join("127.0.0.1", port, rank_offset=1, world_size=2)
        assert read_line(process) == "joined"
        send_line(process)
        transfer.receive(**announce(new))
        engine.sleep(1)
        engine.wake_up()
        assert tokens(engine) == expected(new)
        engine.sleep(2)
        with pytest.raises(InvalidField, match=r"a trainer sent the weights, and they were dropped"):
            engine.wake_up()
        engine.wake_up(["weights"])
        send_line(process)
        transfer.receive(**announce(new))
        engine.wake_up()
        assert tokens(engine) == expected(new)
