"""Launches that take ten times as long as usual are logged, at most once a minute, with hints at the cause."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from msgspec import structs

from support.tiny_models import make_model
from tok_core.model_config.model_config import read_config
from tok_core.models.registry import build
from tok_core.models.weights.loading import load_checkpoint
from tok_core.worker import runner as runner_module
from tok_core.worker.launch_watch import MIN_LAUNCHES, MIN_LOG_INTERVAL, LaunchWatch
from tok_core.worker.runner import Runner
from tok_core.worker.startup.dummy_steps import dummy_step
from tok_core.worker.state import WorkerState
from tok_kernels import choose

CPU = torch.device("cpu")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def launch(watch: LaunchWatch, seconds: float, times: int = 1, *, graph: bool = False, step: int = 7) -> None:
    for _ in range(times):
        watch.begin()
        watch.end(step, seconds, graph=graph)


def test_slow_launch_is_logged_with_usual_time_and_kernels_built(caplog: pytest.LogCaptureFixture) -> None:
    builds = ["old_kernel (compiled, 1.00 s)"]
    watch = LaunchWatch(builds)
    launch(watch, 0.006, MIN_LAUNCHES)
    watch.begin()
    builds.append("rope_kernel (compiled, 0.25 s)")
    watch.end(4711, 0.31, graph=False)
    (line,) = caplog.messages
    assert line.startswith("the launch of step 4711 took the host 310 ms, usually 6.0 ms: ")
    assert line.endswith("kernels built: rope_kernel (compiled, 0.25 s)")


def test_launches_of_graphs_and_of_kernels_have_usual_times_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    watch = LaunchWatch()
    launch(watch, 0.0005, MIN_LAUNCHES, graph=True)
    launch(watch, 0.03, MIN_LAUNCHES)
    assert caplog.messages == []
    launch(watch, 0.03, graph=True)
    (line,) = caplog.messages
    assert "usually 0.5 ms" in line
    assert line.endswith("kernels built: none")


def test_short_launches_and_the_first_ones_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    watch = LaunchWatch()
    launch(watch, 0.001, MIN_LAUNCHES - 1)
    launch(watch, 1.0)
    launch(watch, 0.001, 200)
    launch(watch, 0.019)
    watch.reset()
    launch(watch, 1.0)
    assert caplog.messages == []


def test_one_line_a_minute_counts_the_slow_launches_since_the_last(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    watch = LaunchWatch(clock=clock)
    launch(watch, 0.002, MIN_LAUNCHES)
    launch(watch, 0.5, 3)
    assert len(caplog.messages) == 1
    clock.now += MIN_LOG_INTERVAL
    launch(watch, 0.5)
    assert len(caplog.messages) == 2
    assert caplog.messages[1].endswith("; 2 more slow launches since the last such line")


def test_launches_that_stay_slow_become_the_usual(caplog: pytest.LogCaptureFixture) -> None:
    watch = LaunchWatch()
    launch(watch, 0.002, MIN_LAUNCHES)
    launch(watch, 0.04, 200)
    caplog.clear()
    launch(watch, 0.04)
    assert caplog.messages == []


def test_runner_watches_its_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_model("llama", tmp_path / "model", max_positions=64, layers=1)
    config, backend = read_config(path), choose(CPU)
    model = build(config, backend, CPU, torch.float32)
    load_checkpoint(model, path)
    state = WorkerState(config, CPU, torch.float32, slots=2, num_pages=1, page_size=16, pages_per_slot=4)
    runner = Runner(model, backend, state)
    runner.reset()
    step = structs.replace(dummy_step(decode=1), max_kv=64)
    for _ in range(MIN_LAUNCHES):
        runner.launch(step)
    caplog.set_level(logging.WARNING, logger="tok_core")
    monkeypatch.setattr(runner_module, "time", SimpleNamespace(perf_counter=itertools.count(0.0, 60.0).__next__))
    runner.launch(step)
    (line,) = caplog.messages
    assert "the launch of step 0 took the host" in line
