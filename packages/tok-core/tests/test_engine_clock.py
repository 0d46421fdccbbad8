"""Clocks that jump, step backwards or stand still lose no request, change no token and end no replica."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.engines import cpu_engine, manager_of
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
    # The watchdog takes a step that seems to last an hour for a stuck worker.
    return EngineConfig(
        model=str(path), device="cpu", dtype="float32", kv_cache_tokens=4096, max_running=4, step_timeout=60
    )


@pytest.fixture
def backwards(monkeypatch: pytest.MonkeyPatch) -> itertools.count[int]:
    """Set the wall clock back by an hour at each read."""
    asked = itertools.count()
    monkeypatch.setattr(time, "time", lambda: 2e9 - 3600.0 * next(asked))
    monkeypatch.setattr(time, "time_ns", lambda: int(time.time() * 1e9))
    return asked


def turn_clocks(monkeypatch: pytest.MonkeyPatch, hours: Callable[[int], int], *names: str) -> None:
    """Replace these clocks: their i-th read, counted over all of them, is `hours(i)` off."""
    asked = itertools.count()

    def seconds() -> float:
        return 2e9 + 3600.0 * hours(next(asked))

    for name in names:
        monkeypatch.setattr(time, name, (lambda: int(seconds() * 1e9)) if name.endswith("_ns") else seconds)


WALL, STEADY = ("time", "time_ns"), ("monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns")


@pytest.mark.parametrize(
    ("hours", "names"),
    [
        (lambda i: i, WALL + STEADY),
        (lambda i: i > 40, WALL + STEADY),
        (lambda i: 0, WALL + STEADY),
        (lambda i: -i, WALL),  # other clocks never run backwards
        (lambda i: (-1) ** i, WALL),
    ],
    ids=["runs ahead", "jumps once", "stands still", "runs back", "jumps to and fro"],
)
def test_engine_keeps_tokens_and_timings_when_clocks_jump_or_stop(
    hours: Callable[[int], int], names: tuple[str, ...], config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cpu_engine(Path(config.model), step_timeout=60, max_running=4) as engine:
        wanted = engine.generate(PROMPTS, PARAMS)
        before = engine.stats()
        with monkeypatch.context() as patch:
            turn_clocks(patch, hours, *names)
            manager_of(engine)._watchdog._clock = time.monotonic
            outputs = engine.generate(PROMPTS, PARAMS, progress=True)
        assert_same(outputs, wanted)
        for output in outputs:
            timings = output.timings
            assert timings.first_token is not None
            assert timings.finished is not None
            assert timings.submitted <= timings.first_token <= timings.finished
        assert engine.health().ok
        after = engine.stats()
        assert after["restarts"] == 0
        for part in ("schedule", "launch", "device", "output"):
            assert 0 <= after[f"{part}_seconds"] - before[f"{part}_seconds"] < 60


def assert_same(outputs: list[RequestOutput], wanted: list[RequestOutput]) -> None:
    for output, expected in zip(outputs, wanted, strict=True):
        assert [one.token_ids for one in output.outputs] == [one.token_ids for one in expected.outputs]


def assert_sane(outputs: list[RequestOutput], wanted: list[RequestOutput]) -> None:
    assert_same(outputs, wanted)
    for output in outputs:
        timings = output.timings
        assert timings.first_token is not None
        assert timings.finished is not None
        assert 0 <= timings.first_token - timings.submitted <= timings.finished - timings.submitted < 60


def test_wall_clock_running_backwards_changes_no_token_or_duration(
    config: EngineConfig, backwards: itertools.count[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert time.time() - time.time() == 3600
    with Engine(config, in_process=True) as engine:
        wanted = engine.generate(PROMPTS, PARAMS)
        assert_sane(engine.generate(PROMPTS, PARAMS, progress=True), wanted)
    (tmp_path / "sitecustomize.py").write_text(BACKWARDS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Engine(config) as engine:
        assert len(list(tmp_path.glob("*.backwards"))) == 2  # one from the manager, one from the worker
        assert_sane(engine.generate(PROMPTS, PARAMS, progress=True), wanted)
        assert engine.health().ok
        assert engine.stats()["restarts"] == 0
