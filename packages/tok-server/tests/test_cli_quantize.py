"""`tok quantize` writes a model that `tok models` describes, and reports the errors of its layers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support.quantized_models import write_kv_scales
from support.tiny_models import make_model
from tok_core.model_config import read_config
from tok_core.models import weights
from tok_core.models.weights.checkpoint_quantization import WrittenTensor
from tok_server.cli import main
from tok_server.demo import MODEL_DIR


def test_quantize_writes_a_model_and_reports_the_error_of_each_matrix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "fp8"
    assert main(["quantize", str(MODEL_DIR), str(out)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "_proj" in line]
    assert {row[1] for row in rows} == {
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    }
    assert all(0.01 < float(row[3]) <= float(row[5]) < 0.05 for row in rows)
    assert main(["models", str(out)]) == 0
    described = capsys.readouterr().out
    assert "linear layers  float8 with a scale for each row; dense: lm_head" in described
    assert "KV cache       as computed" in described
    write_kv_scales(out, torch.ones(read_config(out).num_layers, 2))
    assert main(["models", str(out)]) == 0
    assert "KV cache       float8 with a scale for each layer" in capsys.readouterr().out


def test_all_experts_of_a_layer_share_a_row_of_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_model("qwen2-moe", tmp_path / "moe")
    assert main(["quantize", str(path), str(tmp_path / "fp8")]) == 0
    rows = {row[1]: row for row in (line.split() for line in capsys.readouterr().out.splitlines()) if len(row) > 1}
    for name in ("gate", "up", "down"):
        assert rows[f"mlp.experts.*.{name}_proj"][7] == "1"  # only layer 1 has experts
        assert f"mlp.shared_expert.{name}_proj" in rows
    assert main(["models", str(tmp_path / "fp8")]) == 0
    assert "float8 with a scale for each row; dense: lm_head" in capsys.readouterr().out


def test_terminated_quantize_leaves_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, quantize, survived = tmp_path / "out", weights.quantize_checkpoint, list[int]()

    def terminating(*arguments: Any) -> Iterator[WrittenTensor]:
        for tensor in quantize(*arguments):
            assert out.is_dir()
            os.kill(os.getpid(), signal.SIGTERM)
            yield tensor

    monkeypatch.setattr(weights, "quantize_checkpoint", terminating)
    handler = signal.signal(signal.SIGTERM, lambda number, _: survived.append(number))
    try:
        assert main(["quantize", str(MODEL_DIR), str(out)]) == 130
        assert not out.exists()
        os.kill(os.getpid(), signal.SIGTERM)
        assert survived == [signal.SIGTERM]  # the process's own handler is back
    finally:
        signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--scheme", "int4-g128"], 1, "allowed: multiples of [1, 128]"),  # the demo model's width is 192
        (["--scheme", "int3"], 2, "--scheme is 'int3'; allowed: fp8-dynamic, fp8-block, int4-g128"),
    ],
)
def test_quantize_refuses_what_it_cannot_round_in_one_line(
    arguments: list[str], code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        ended = main(["quantize", str(MODEL_DIR), str(tmp_path / "out"), *arguments])
    except SystemExit as error:
        ended = int(error.code or 0)
    error_text = capsys.readouterr().err
    assert ended == code
    assert message in error_text
    assert error_text.count("\n") == 1
    assert not (tmp_path / "out").exists()
