"""`tok warm` starts an engine that keeps its kernels in a directory, and refuses machines without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tok_core import EngineConfig
from tok_server.cli import main
from tok_server.commands import warm
from tok_server.demo import MODEL_DIR


def test_warm_starts_an_engine_with_the_flags_of_serve_and_closes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[EngineConfig] = []
    out = tmp_path / "kernels"

    class Started:
        def __init__(self, config: EngineConfig) -> None:
            started.append(config)

        def close(self) -> None:
            out.mkdir()
            (out / "kernel").write_bytes(bytes(3 << 20))

    monkeypatch.setattr(warm, "Engine", Started)
    words = ["warm", "./my-model", "--out", str(out), "--max-model-len", "4096", "--kv-cache-dtype", "fp8"]
    assert main(words) == 0
    assert started == [EngineConfig(model="./my-model", cache_dir=str(out), max_model_len=4096, kv_cache_dtype="fp8")]
    assert capsys.readouterr().out.startswith(f"{out}: 3 MiB, after a start of ")


def test_warm_names_its_own_flag_for_an_empty_directory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warm", str(MODEL_DIR), "--out", ""]) == 2
    assert capsys.readouterr().err == "tok warm: error: --out is ''; allowed: a directory\n"


def test_warm_is_refused_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "kernels"
    assert main(["warm", str(MODEL_DIR), "--out", str(out), "--device", "cpu"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("tok warm: error: --out is '")  # a long path is cut
    assert line.endswith("; allowed: only on a GPU (no kernel is compiled on cpu)")
    assert not out.exists()
