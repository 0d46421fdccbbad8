"""Tensors of an update that fails, or that was not finished, never mix with other weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.engines import cpu_engine, random_prompts
from support.serving import free_port
from support.tiny_models import make_model, reference_greedy
from support.trainer import announce, send_line, trainer
from tok_core import Engine, InvalidField, ModelError, SamplingParams

pytestmark = pytest.mark.usefixtures("forked_children")

PROMPTS = random_prompts((5, 33, 64))
NEW = 8
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("qwen2", tmp_path_factory.mktemp("old") / "model", layers=4)


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("qwen2", tmp_path_factory.mktemp("new") / "model", layers=4, seed=1)


def tokens(engine: Engine) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in engine.generate(PROMPTS, GREEDY)]


def expected(path: Path) -> list[list[int]]:
    return [ids for ids, _ in reference_greedy(path, PROMPTS, NEW)]


def cut(info: dict[str, Any], first: int, end: int | None = None) -> dict[str, Any]:
    """Return a part of `announce`'s arguments."""
    return {key: value[first:end] for key, value in info.items()}


@pytest.mark.parametrize("paused", [True, False])
def test_a_directory_replaces_tensors_received_before_it(old: Path, new: Path, *, paused: bool) -> None:
    with cpu_engine(old) as engine:
        transfer, port, info = engine.weight_transfer, free_port(), announce(old)
        with trainer(port, 2, old) as process:
            transfer.join("127.0.0.1", port, rank_offset=1, world_size=2)
            if paused:
                engine.pause()
            else:
                transfer.start()
            send_line(process)
            transfer.receive(**cut(info, 0, 9), hold=True)
            engine.update_weights(str(new))
            if paused:
                engine.resume()
            else:
                with pytest.raises(ModelError, match="the update has failed"):
                    transfer.finish()
            assert tokens(engine) == expected(new)
            assert engine.weight_version == "1"


def test_a_session_with_a_refused_call_applies_none_of_its_tensors(old: Path, new: Path) -> None:
    with cpu_engine(old) as engine:
        transfer, port, info = engine.weight_transfer, free_port(), announce(new)
        with trainer(port, 2, new, old) as process:
            transfer.join("127.0.0.1", port, rank_offset=1, world_size=2)
            transfer.start()
            send_line(process)
            transfer.receive(**cut(info, 0, 9))
            with pytest.raises(InvalidField, match="names is"):
                transfer.receive(**{key: value * 2 for key, value in cut(info, 9, 10).items()})
            transfer.receive(**cut(info, 9))
            with pytest.raises(ModelError, match="the update has failed"):
                transfer.finish()
            assert tokens(engine) == expected(old)
            send_line(process)
            transfer.receive(**cut(announce(old), 0, 1))  # an update of its own, without those received before
            assert tokens(engine) == expected(old)
            transfer.receive(**cut(announce(old), 1))


@pytest.mark.parametrize("finishes", [True, False])
def test_a_trainer_that_joins_again_ends_the_update_of_the_one_before(old: Path, new: Path, *, finishes: bool) -> None:
    with cpu_engine(old) as engine:
        transfer, port, info = engine.weight_transfer, free_port(), announce(new)
        with trainer(port, 2, new) as process:
            transfer.join("127.0.0.1", port, rank_offset=1, world_size=2)
            transfer.start()
            send_line(process)
            transfer.receive(**cut(info, 0, 9))
        port = free_port()
        with trainer(port, 2, new) as process:
            transfer.join("127.0.0.1", port, rank_offset=1, world_size=2)
            if finishes:
                with pytest.raises(InvalidField, match="no open update"):
                    transfer.finish()
                assert tokens(engine) == expected(old)
            send_line(process)
            transfer.receive(**info)
            assert tokens(engine) == expected(new)


@pytest.mark.parametrize("version", ["", 5])
def test_versions_are_texts_that_are_not_empty(old: Path, version: Any) -> None:
    with cpu_engine(old) as engine:
        engine.weight_transfer.start()
        for call in (
            lambda: engine.weight_transfer.finish(version),
            lambda: engine.weight_transfer.receive(["x"], ["float32"], [[1]], version=version),
            lambda: engine.update_weights(str(old), version=version),
        ):
            with pytest.raises(InvalidField, match=r"version is .*; allowed: text of at least one character"):
                call()
        assert engine.weight_version == "default"


def test_an_update_without_tensors_only_names_the_weights(old: Path) -> None:
    with cpu_engine(old) as engine:
        transfer = engine.weight_transfer
        for version, named in (("a", "a"), (None, "a"), ("b", "b")):
            transfer.start()
            transfer.finish(version)
            assert engine.weight_version == named
            outputs = engine.generate(PROMPTS, GREEDY)
            assert [output.outputs[0].weight_version for output in outputs] == [named] * len(PROMPTS)
        assert tokens(engine) == expected(old)
