"""`tok bench manager`: the real manager over a worker that computes nothing, timed per step and per part."""

from __future__ import annotations

import json
import time

import pytest

from tok_server.bench.manager.command import MAX_BENCH_SEQUENCES
from tok_server.bench.manager.load import LOADS
from tok_server.bench.manager.manager import PAIRS, STEPS, run_manager
from tok_server.bench.manager.profiler import PARTS
from tok_server.bench.manager.result import table
from tok_server.cli import main, make_parser

KEYS = ["engine", "workload", "sequences", "us_per_token", "ms_per_step", *PARTS]


@pytest.mark.parametrize("name", sorted(LOADS.keys() - {"admission"}))
def test_every_workload_keeps_its_slots_full_and_reports_cost_per_part(name: str) -> None:
    result = run_manager(name, 64)
    assert (result.engine, result.workload, result.sequences) == ("tok", name, 64)
    assert 60 <= result.running <= 64
    assert result.steps >= 2 * PAIRS * STEPS
    assert result.us_per_token is not None
    # Every sequence of a step yields a token, except those that have ended or just start.
    assert result.ms_per_step * 1e3 / 64 * 0.8 < result.us_per_token < result.ms_per_step * 1e3 / 64 * 2.5
    parts = [getattr(result, part) for part in PARTS]
    assert sum(parts) == pytest.approx(result.ms_per_step, rel=0.02)
    for part in ("schedule", "pages", "messages", "outputs", "stops"):
        assert getattr(result, part) > 0, part


def test_shared_prompts_cost_grouping_and_ending_samples_cost_admission() -> None:
    decode, monkeys = run_manager("decode", 64), run_manager("monkeys", 64)
    assert decode.groups < monkeys.groups
    assert decode.forecast < monkeys.forecast
    assert decode.discarded_share == 0 < monkeys.discarded_share


def test_decode_step_sends_only_its_slots_and_new_pages() -> None:
    small, large = run_manager("decode", 64), run_manager("decode", 256)
    for result in (small, large):  # 4 bytes each for slot, row and place, and 12 for every 16th's new page
        assert 3 * 4 * result.sequences < result.input_bytes < 4 * 4 * result.sequences + 1024
        assert 2 * 4 * result.sequences < result.output_bytes < 2 * 4 * result.sequences + 512


def test_admission_workload_measures_until_every_request_has_started() -> None:
    result = run_manager("admission", 48)
    assert result.us_per_token is None
    assert result.running == 48
    assert result.seconds is not None
    assert result.us_per_request == pytest.approx(result.seconds / 48 * 1e6, abs=6e-5 / 48 * 1e6)  # rounded to 0.1 ms
    assert result.input_bytes * result.steps / 2 > 48 * 500 * 4  # at least the unshared halves of the prompts


def test_step_time_delays_the_worker_but_not_the_managers_cpu_time() -> None:
    began = time.monotonic()
    result = run_manager("churn", 16, step_seconds=2e-3)
    took = time.monotonic() - began
    assert took >= result.steps * 2e-3
    assert result.step_time_ms == 2.0
    assert result.ms_per_step * result.steps * 1e-3 < took


def test_json_output_is_one_object_with_stable_leading_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "manager", "--workload", "churn", "--sequences", "16", "--stop", "stop", "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    values = json.loads(out)
    assert list(values)[: len(KEYS)] == KEYS
    assert (values["workload"], values["sequences"], values["stop"]) == ("churn", 16, "stop")
    assert "seconds" not in values


def test_bench_manager_table_names_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "manager", "--workload", "decode", "--sequences", "16", "--stop", "the end"]) == 0
    told = capsys.readouterr().out
    assert "decode, 16 sequences, stop 'the end'" in told
    for word in ("CPU per token, µs", "CPU per step, ms", "bytes to the engine", *PARTS):
        assert word in told
    assert "CPU until all started, s" in table(run_manager("admission", 4))


def test_bench_manager_has_exactly_the_listed_flags() -> None:
    options = make_parser(["bench"]).parse_args(["bench", "manager", "--workload", "decode"])
    values = {name: value for name, value in vars(options).items() if name not in ("command", "kind", "module")}
    assert values == {"workload": "decode", "sequences": 8192, "stop": None, "step_time": 0.0, "json": False}
    assert options.module == "tok_server.bench.manager.command"


@pytest.mark.parametrize("name", sorted(LOADS))
def test_bench_manager_accepts_every_workload(name: str) -> None:
    assert make_parser(["bench"]).parse_args(["bench", "manager", "--workload", name]).workload == name


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--sequences", "0"], f"--sequences is 0; allowed: integers from 1 to {MAX_BENCH_SEQUENCES}"),
        (["--sequences", "65537"], f"--sequences is 65537; allowed: integers from 1 to {MAX_BENCH_SEQUENCES}"),
        (["--step-time", "-1"], "--step-time is -1.0; allowed: milliseconds from 0"),
        (["--step-time", "nan"], "--step-time is nan; allowed: milliseconds from 0"),
        (["--stop", ""], "--stop is ''; allowed: strings of 1 to 4096 characters"),
    ],
)
def test_bench_manager_refuses_invalid_flag_values(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "manager", "--workload", "decode", *flags]) == 2
    assert told in capsys.readouterr().err
