"""Busy time from intervals and traces: overlaps count once, gaps are times that no interval covers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tok_core import TokError
from tok_server.bench.busy import Gap, KernelTotal, describe, device_time, trace_device_time


def test_gaps_are_found_among_overlapping_and_nested_intervals() -> None:
    #        a: 1–4, b: 2–3 within it, a: 3.5–5 overlapping, a gap of 1, c: 6–7, a gap of 2, b: 9–10
    found = device_time([6.0, 1.0, 2.0, 9.0, 3.5], [7.0, 4.0, 3.0, 10.0, 5.0], ["c", "a", "b", "b", "a"])
    assert (found.seconds, found.idle, found.idle_share) == (9.0, 3.0, 3 / 9)
    assert found.gaps == [Gap(2.0, 6.0, "c", "b"), Gap(1.0, 4.0, "a", "c")]
    assert found.kernels == [KernelTotal("a", 4.5, 2), KernelTotal("b", 2.0, 2), KernelTotal("c", 1.0, 1)]


def test_gap_follows_the_interval_that_ended_last() -> None:
    found = device_time([0.0, 1.0, 6.0], [5.0, 2.0, 7.0], ["long", "short", "next"])
    assert found.gaps == [Gap(1.0, 5.0, "long", "next")]


def test_intervals_without_gaps_have_no_idle_time() -> None:
    found = device_time([0.0, 1.0], [1.0, 2.0], ["a", "b"])
    assert (found.idle, found.gaps) == (0.0, [])
    assert device_time([3.0], [3.0], ["point"]).idle_share == 0.0
    with pytest.raises(ValueError, match="names is empty"):
        device_time([], [], [])


def test_communication_not_hidden_by_compute_counts_as_communication() -> None:
    #       a GEMM 0–4, a collective 3–6 that it covers in part, a gap of 1, a receive 7–9 and a GEMM 8–10, a copy 10–12
    names = ["gemm", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "ncclDevKernel_SendRecv", "gemm", "Memcpy PtoP"]
    found = device_time([0.0, 3.0, 7.0, 8.0, 10.0], [4.0, 6.0, 9.0, 10.0, 12.0], names)
    assert (found.seconds, found.idle, found.communication) == (12.0, 1.0, 2.0 + 1.0 + 2.0)
    assert describe(found).splitlines()[0].endswith("91.7% busy, 8.3% idle in 1 gaps; 41.7% communication only")
    hidden = device_time([0.0, 1.0], [4.0, 2.0], ["gemm", "ncclKernel"])
    assert hidden.communication == 0
    assert "communication" not in describe(hidden)
    assert device_time([0.0], [4.0], ["ncclKernel"]).communication_share == 1


TICKS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), min_size=1, max_size=25)


@given(TICKS)
def test_idle_time_is_the_time_that_no_interval_covers(ticks: list[tuple[int, int]]) -> None:
    start = np.array([begin for begin, _ in ticks], float)
    end = start + np.array([length for _, length in ticks])
    names = [("gemm", "ncclDevKernel", "norm")[i % 3] for i in range(len(ticks))]
    found = device_time(start, end, names)
    moments = np.arange(start.min(), end.max()) + 0.5
    runs = (start[:, None] < moments) & (moments < end[:, None])
    covered, computing = runs.any(axis=0), runs[[name != "ncclDevKernel" for name in names]].any(axis=0)
    assert found.seconds == len(moments)
    assert found.idle == (~covered).sum() == sum(gap.seconds for gap in found.gaps)
    assert found.communication == (covered & ~computing).sum()
    assert sum(work.seconds for work in found.kernels) == (end - start).sum()
    assert sum(work.calls for work in found.kernels) == len(ticks)


def write(file: Path, events: list[tuple[str, str, float, float]]) -> Path:
    """Write a trace of events given as category, name, start and length in microseconds."""
    told = [{"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 0} for cat, name, ts, dur in events]
    file.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [{"ph": "M", "name": "process_name"}, *told]}))
    return file


def test_gpu_trace_counts_kernels_and_device_copies_but_not_host_copies(tmp_path: Path) -> None:
    file = write(
        tmp_path / "trace.json",
        [
            ("cuda_runtime", "cudaLaunchKernel", 0.0, 9000.0),
            ("kernel", "decode", 1e9, 300.0),
            ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 1e9 + 300, 50.0),
            ("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 1e9 + 400, 100.0),
            ("gpu_memset", "Memset (Device)", 1e9 + 500, 100.0),
            ("kernel", "decode", 1e9 + 700, 300.0),
        ],
    )
    found = trace_device_time(file)
    assert found.seconds == pytest.approx(1e-3)
    assert found.idle == pytest.approx(200e-6)
    assert (found.kernels[0].name, found.kernels[0].calls) == ("decode", 2)
    assert found.kernels[0].seconds == pytest.approx(600e-6)
    lines = describe(found).splitlines()
    assert lines[0] == "1.0 ms: 80.0% busy, 20.0% idle in 2 gaps"
    assert lines[2].split() == ["decode", "0.60", "60.0%", "2"]
    assert "gap of 0.100 ms at 0.3 ms, after decode, before Memcpy DtoD" in lines[5]


def test_cpu_trace_counts_only_outermost_operators(tmp_path: Path) -> None:
    nested = [("cpu_op", "linear", 0.0, 50.0), ("cpu_op", "addmm", 10.0, 40.0), ("cpu_op", "relu", 60.0, 40.0)]
    found = trace_device_time(write(tmp_path / "trace.json", nested))
    assert [(work.name, work.calls) for work in found.kernels] == [("linear", 1), ("relu", 1)]
    assert found.idle == pytest.approx(10e-6)


@pytest.mark.parametrize("content", ["", "[]", '{"traceEvents": 3}', '{"traceEvents": []}'])
def test_file_that_is_not_a_trace_raises_an_error_naming_the_file(content: str, tmp_path: Path) -> None:
    (file := tmp_path / "trace.json").write_text(content)
    with pytest.raises(TokError, match=r"trace\.json: (is not a trace|the trace contains no computation)"):
        trace_device_time(file)


def test_describe_cuts_long_names_to_keep_columns() -> None:
    lines = describe(device_time([0.0, 2.0], [1.0, 3.0], ["k" * 300, "b"])).splitlines()
    assert len({len(line) for line in lines[1:4]}) == 1
    assert max(map(len, lines)) < 120
