"""Tracer: exactly the steps asked for are in the file, and the file is whole once it is there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tok_core import EngineConfig, InvalidField
from tok_core.config import TRACE_WARM_UP
from tok_core.mesh import RankCoordinates, all_coordinates
from tok_core.runtime.trace_paths import trace_files
from tok_core.worker.trace import Tracer

CPU = torch.device("cpu")
STEPS = {12: torch.relu, 13: torch.tanh, 14: torch.sigmoid, 15: torch.exp}


def test_the_steps_asked_for_are_traced_and_no_others(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    tracer = Tracer.of(EngineConfig(model="m", trace=str(file), trace_from=13, trace_steps=2), RankCoordinates(), CPU)
    assert tracer is not None
    numbers = torch.ones(8)
    for step in range(1, 18):
        assert file.exists() == (step > 15)
        tracer.before(step)
        STEPS.get(step, torch.cos)(numbers)
    traced = json.loads(file.read_text())["traceEvents"]
    assert [event["name"] for event in traced if event.get("cat") == "cpu_op"] == ["aten::tanh", "aten::sigmoid"]
    assert [one.name for one in tmp_path.iterdir()] == ["trace.json"]


def test_without_a_file_nothing_is_traced() -> None:
    assert Tracer.of(EngineConfig(model="m"), RankCoordinates(), CPU) is None
    assert trace_files(EngineConfig(model="m", tp=2)) == {}


def test_each_worker_has_a_file_of_its_own_and_the_one_that_returns_tokens_has_the_one_asked_for() -> None:
    files = trace_files(EngineConfig(model="m", tp=2, pp=2, trace="a/steps.json"))
    assert list(files) == list(all_coordinates(2, 2))
    assert [str(file) for file in files.values()] == [
        "a/steps.stage0.rank0.json",
        "a/steps.stage0.rank1.json",
        "a/steps.json",
        "a/steps.stage1.rank1.json",
    ]


def test_a_worker_traces_into_its_own_file(tmp_path: Path) -> None:
    config = EngineConfig(model="m", pp=2, trace=str(tmp_path / "steps.json"), trace_steps=1)
    tracer = Tracer.of(config, RankCoordinates(stage=0, stages=2), CPU)
    assert tracer is not None
    for step in range(1, 13):
        tracer.before(step)
        torch.tanh(torch.ones(8))
    assert [one.name for one in tmp_path.iterdir()] == ["steps.stage0.rank0.json"]


def test_a_file_that_cannot_be_written_is_an_error_at_the_start(tmp_path: Path) -> None:
    config = EngineConfig(model="m", trace=str(tmp_path / "no" / "trace.json"))
    with pytest.raises(InvalidField, match=r"trace is '.*; allowed: a file in a directory that exists"):
        Tracer.of(config, RankCoordinates(), CPU)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("trace", "", "a file"),
        ("trace", 3, "a file"),
        ("trace_from", TRACE_WARM_UP, f"integers from {TRACE_WARM_UP + 1}"),
        ("trace_steps", 0, "integers from 1"),
    ],
)
def test_what_cannot_be_traced_is_named(field: str, value: object, allowed: str) -> None:
    with pytest.raises(InvalidField, match=f"{field} is {value!r}; allowed: {allowed}"):
        EngineConfig(model="m", **{field: value})  # type: ignore[arg-type]
