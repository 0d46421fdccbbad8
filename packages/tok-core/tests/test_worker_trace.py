"""The tracer records exactly the requested steps, and its file is complete once it exists."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tok_core import EngineConfig, InvalidField
from tok_core.config import TRACE_WARM_UP, RankCoordinates, all_coordinates
from tok_core.runtime.trace_paths import trace_files
from tok_core.worker.trace import Tracer

CPU = torch.device("cpu")
STEPS = {12: torch.relu, 13: torch.tanh, 14: torch.sigmoid, 15: torch.exp}


def test_tracer_records_only_the_requested_steps(tmp_path: Path) -> None:
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


def test_tracer_is_absent_without_a_trace_file() -> None:
    assert Tracer.of(EngineConfig(model="m"), RankCoordinates(), CPU) is None
    assert trace_files(EngineConfig(model="m", tp=2)) == {}


def test_each_worker_has_its_own_trace_file() -> None:
    """Rank 0 of the last stage, which returns tokens, writes to the configured path itself."""
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


def test_unwritable_trace_file_is_an_error_at_startup(tmp_path: Path) -> None:
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
def test_invalid_trace_settings_are_named(field: str, value: object, allowed: str) -> None:
    with pytest.raises(InvalidField, match=f"{field} is {value!r}; allowed: {allowed}"):
        EngineConfig(model="m", **{field: value})  # type: ignore[arg-type]
