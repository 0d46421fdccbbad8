"""The engine asks only clocks that cannot be set: a wall clock that steps backwards harms nothing."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from support.tiny_models import make_model
from tok_core import Engine, EngineConfig, RequestOutput, SamplingParams

PROMPTS = [[1, 2, 3], [4, 5], list(range(100))]
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, n=2)

BACKWARDS = """
import itertools, os, pathlib, time
asked = itertools.count()
pathlib.Path(__file__).with_name(f"{os.getpid()}.backwards").touch()
time.time = lambda: 2e9 - 3600.0 * next(asked)
time.time_ns = lambda: int(time.time() * 1e9)
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    path: Path = make_model("llama", tmp_path_factory.mktemp("clock") / "llama")
    # A step that seems to take an hour would be taken for a stuck worker.
    return EngineConfig(
        model=str(path), device="cpu", dtype="float32", kv_cache_tokens=4096, max_running=4, step_timeout=60
    )


@pytest.fixture
def backwards(monkeypatch: pytest.MonkeyPatch) -> itertools.count[int]:
    """Each look at the wall clock finds it an hour earlier than the last."""
    asked = itertools.count()
    monkeypatch.setattr(time, "time", lambda: 2e9 - 3600.0 * next(asked))
    monkeypatch.setattr(time, "time_ns", lambda: int(time.time() * 1e9))
    return asked


def assert_sane(outputs: list[RequestOutput], wanted: list[RequestOutput]) -> None:
    for output, expected in zip(outputs, wanted, strict=True):
        assert [one.token_ids for one in output.outputs] == [one.token_ids for one in expected.outputs]
        timings = output.timings
        assert timings.first_token is not None
        assert timings.finished is not None
        assert 0 <= timings.first_token - timings.submitted <= timings.finished - timings.submitted < 60


def test_a_wall_clock_that_steps_backwards_harms_nothing(
    config: EngineConfig, backwards: itertools.count[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert time.time() - time.time() == 3600
    with Engine(config, in_process=True) as engine:
        wanted = engine.generate(PROMPTS, PARAMS)
        assert_sane(engine.generate(PROMPTS, PARAMS, progress=True), wanted)
    (tmp_path / "sitecustomize.py").write_text(BACKWARDS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Engine(config) as engine:
        assert len(list(tmp_path.glob("*.backwards"))) == 2  # in the manager and in the worker
        assert_sane(engine.generate(PROMPTS, PARAMS, progress=True), wanted)
        assert engine.health().ok
        assert engine.stats()["restarts"] == 0
