"""`tok kernels` and `tok bench kernels`: their output and the flag values they refuse."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tok_core.model_config.model_config import read_config
from tok_core.worker.startup.kernel_report import KernelsMeasured, KernelTime, PhaseReport
from tok_core.worker.startup.resolve import attention_shape
from tok_kernels.calibration import Measurement
from tok_kernels.measure import Timing
from tok_server.cli import main, make_parser
from tok_server.commands.bench_kernels import as_json
from tok_server.commands.bench_kernels import show as show_kernels
from tok_server.commands.kernels import show
from tok_server.flags.engine_flags import DEMO_MODEL

SHAPE = attention_shape(read_config(DEMO_MODEL), 16, torch.bfloat16, torch.float8_e4m3fn)
TIMES = [
    KernelTime("rms_norm", "8192 × 2048", 0.02, 0.016),
    KernelTime("attention: prefill", "16 × 512", 0.5, 0.1),
    KernelTime("GEMMs of a forward pass", "64 rows", 2.0, 1.0, tokens=64),
    KernelTime("GEMMs of a forward pass", "8192 rows", 40.0, 32.0, tokens=8192),
]
MEASURED = KernelsMeasured("Some GPU", "triton", 1, 4.25, 690.0, 1300.0, iter(()))


def printed(draw: object, *what: object) -> str:
    text = StringIO()
    draw(*what, Console(file=text, width=120))  # type: ignore[operator]
    return text.getvalue()


def test_kernels_on_a_cpu_use_the_reference_for_every_phase(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "--device", "cpu", "--heads", "8", "--kv-heads", "4", "--head-dim", "128"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "cpu: heads 8, kv_heads 4, head_dim 128, page_size 16, layers 6, dtype float32" in told
    assert "prefill reference decode reference cascade reference" in told


def test_kernels_with_tp_show_the_heads_of_a_single_rank(capsys: pytest.CaptureFixture[str]) -> None:
    for sizes, told in (([], "heads 3, kv_heads 1"), (["--heads", "64", "--kv-heads", "8"], "heads 32, kv_heads 4")):
        assert main(["kernels", "--device", "cpu", "--tp", "2", *sizes]) == 0
        assert f"cpu, rank 0 of 2: {told}, head_dim 32" in " ".join(capsys.readouterr().out.split())


def test_kernels_report_shows_times_choices_and_excluded_kernels(tmp_path: Path) -> None:
    report = PhaseReport(
        device="Some GPU",
        tp=1,
        shape=SHAPE,
        fastest={"prefill": "flashinfer fa3", "decode": "triton", "cascade": "triton"},
        cached=False,
        directory=tmp_path,
        measured=(Measurement("prefill", "flashinfer fa3", "16 × 512", Timing(0.2, 0.05, 0.8), 0.21),),
        rejected={"decode flashinfer": "RuntimeError: no [compiler]"},
        launches=("tile: Launch(rows=64)",),
    )
    told = printed(show, report)
    for part in (
        "Some GPU: heads 6, kv_heads 2, head_dim 32, page_size 16, layers 6, dtype bfloat16, cache_dtype float8_e4m3fn",
        "prefill  flashinfer fa3",
        "0.200",
        "0.210",
        f"measured now, stored in {tmp_path}",
        "unavailable: decode flashinfer: RuntimeError: no [compiler]",
        "tuned launch for tile: Launch(rows=64)",
    ):
        assert part in told


def test_bench_kernels_shows_times_and_floors_as_table_and_json() -> None:
    told = printed(show_kernels, MEASURED, TIMES)
    for part in ("Some GPU, triton", "rms_norm", "0.020", "80%", "4.25 TB/s (copy)", "690 TFLOP/s"):
        assert part in told
    assert told.endswith("\nGEMMs alone: 204,800 tokens/s at 8,192 rows\n")
    assert "rank" not in told
    values = json.loads(as_json(MEASURED, TIMES))
    assert (values["bandwidth_tb_s"], values["tp"], values["tokens_per_second"]) == (4.25, 1, 204800.0)
    assert values["kernels"][1] == {
        "kernel": "attention: prefill", "size": "16 × 512", "ms": 0.5, "floor_ms": 0.1, "share_of_floor": 0.2
    }  # fmt: skip


def test_bench_kernels_with_tp_names_the_rank() -> None:
    of_four = replace(MEASURED, tp=4)
    told = printed(show_kernels, of_four, TIMES)
    assert "Some GPU, triton, rank 0 of 4" in told
    assert told.endswith("\nGEMMs alone: 204,800 tokens/s at 8,192 rows, 4 ranks together\n")
    assert json.loads(as_json(of_four, TIMES))["tp"] == 4


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["bench", "kernels", "--device", "cpu"], "tok bench: error: --device is 'cpu'; allowed: cuda"),
        (["bench", "kernels", "--device", "cpu", "--tp", "4"], "tok bench: error: --tp is 4; allowed: divisors of 6"),
        (["kernels", "--device", "cpu", "--tp", "3"], "tok kernels: error: --tp is 3; allowed: divisors and multiples"),
        (["kernels", "--device", "cpu", "--heads", "5"], "tok kernels: error: --heads is 5; allowed: multiples of 2"),
        (["kernels", "--device", "cpu", "--layers", "0"], "tok kernels: error: --layers is 0; allowed: integers"),
        (["kernels", "--device", "cpu", "--backend", "triton"], "tok kernels: error: --backend is 'triton'; allowed"),
    ],
)
def test_kernels_commands_refuse_invalid_flag_values(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(told)
    assert error.count("\n") == 1


def test_kernels_commands_accept_the_engine_flags() -> None:
    for words, module in ((["kernels"], "kernels"), (["bench", "kernels"], "bench_kernels")):
        flags = ["--kv-cache-dtype", "fp8", "--page-size", "32", "--tp", "2"]
        options = make_parser(words[:1]).parse_args([*words, *flags])
        assert options.module == f"tok_server.commands.{module}"
        assert (options.kv_cache_dtype, options.page_size, options.tp, options.model) == ("fp8", 32, 2, None)


@pytest.mark.gpu
def test_kernels_on_a_gpu_are_measured_once_and_then_cached(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sizes = ["--heads", "8", "--kv-heads", "2", "--head-dim", "64", "--layers", "4"]
    for origin in ("measured now, stored in", "cached in"):
        assert main(["kernels", *sizes]) == 0
        assert f"{origin} {tmp_path}" in capsys.readouterr().out
    assert main(["kernels", *sizes, "--measure"]) == 0
    assert "measured now" in capsys.readouterr().out


@pytest.mark.gpu
def test_bench_kernels_on_a_gpu_measures_every_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels", "--backend", "triton", "--tp", "2", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["tp"] == 2
    assert values["tokens_per_second"] > 0
    assert {one["kernel"].partition(":")[0].partition(",")[0] for one in values["kernels"]} == {
        *("attention", "sample", "rms_norm", "rope_and_write_kv", "copy of pages", "silu_and_mul"),
        *("linear", "gated_linear", "fp8 linear", "fp8 gated_linear", "int4 linear", "int4 gated_linear"),
        *("project_and_write_kv", "GEMMs of a forward pass"),
    }
    assert all(one["ms"] > 0 and one["floor_ms"] > 0 for one in values["kernels"])
