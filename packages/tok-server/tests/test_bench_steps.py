"""`tok bench steps` on tiny models: the floor counts the bytes of the files, the times belong to the batch sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from rich.console import Console
from safetensors.torch import load_file

from support.engines import cpu_engine
from support.tiny_models import make_model
from tok_core import EngineConfig, InvalidField
from tok_core.worker import StepFloor
from tok_core.worker.startup.kernel_report import floor_at, step_floor
from tok_server.bench.steps import LEAD_TOKENS, StepTime, measure
from tok_server.cli import main
from tok_server.commands.bench_steps import read_batch_sizes, require_capacity, show

BANDWIDTH = 1e9
CONFIG: dict[str, Any] = {"dtype": "float32", "device": "cpu"}


def bytes_of(path: Path, *without: str) -> int:
    tensors = load_file(path / "model.safetensors")
    return sum(tensor.nbytes for name, tensor in tensors.items() if not any(part in name for part in without))


def floor_of(path: Path, tp: int = 1, pp: int = 1) -> StepFloor:
    return floor_at(BANDWIDTH, EngineConfig(model=str(path), **CONFIG, tp=tp, pp=pp))


@pytest.mark.parametrize("kind", ["llama", "llama-untied"])
def test_floor_counts_all_weights_but_an_embedding_that_is_looked_up(kind: str, tmp_path: Path) -> None:
    path = make_model(kind, tmp_path / kind)
    floor = floor_of(path)
    without = ("embed_tokens",) if kind == "llama-untied" else ()
    assert (floor.weight_bytes, floor.expert_bytes) == (bytes_of(path, *without), 0)
    config = json.loads((path / "config.json").read_text())
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    cached = 2 * 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * head + 8
    assert floor.kv_position_bytes == cached
    assert floor.milliseconds(3, 100) == pytest.approx((floor.weight_bytes + 300 * cached) / BANDWIDTH * 1e3)


def test_floor_of_stages_adds_up_to_that_of_the_model(tmp_path: Path) -> None:
    path = make_model("llama-untied", tmp_path / "m")
    whole, stages, ranks = floor_of(path), floor_of(path, pp=2), floor_of(path, tp=2)
    assert stages.weight_bytes == whole.weight_bytes
    assert whole.weight_bytes / 2 <= ranks.weight_bytes < 0.6 * whole.weight_bytes
    assert ranks.kv_position_bytes < 0.6 * whole.kv_position_bytes


def test_floor_counts_the_experts_that_rows_are_expected_to_choose(tmp_path: Path) -> None:
    path = make_model("mixtral", tmp_path / "m")
    floor, share = floor_of(path), 2 / 4
    assert floor.activation_ratio == share
    assert floor.weight_bytes + floor.expert_bytes == bytes_of(path, *([] if tied(path) else ["embed_tokens"]))
    read = [floor.milliseconds(rows, 0) * BANDWIDTH / 1e3 - floor.weight_bytes for rows in (1, 2, 100)]
    assert read == pytest.approx([floor.expert_bytes * one for one in (0.5, 0.75, 1.0)])


def tied(path: Path) -> bool:
    return bool(json.loads((path / "config.json").read_text())["tie_word_embeddings"])


def test_cpus_have_no_floor(tiny_model: Path) -> None:
    assert step_floor(EngineConfig(model=str(tiny_model), **CONFIG)) is None


def test_measured_steps_are_those_after_the_lead(tiny_model: Path) -> None:
    with cpu_engine(tiny_model) as engine:
        one, three = measure(engine, [1, 3], prompt_tokens=9, steps=6, reps=2, floor=floor_of(tiny_model))
        stats = engine.stats()
    assert (one.batch, three.batch) == (1, 3)
    assert stats["output_tokens"] == (1 + 3) * (LEAD_TOKENS + 2 * (LEAD_TOKENS + LEAD_TOKENS + 6))
    for times in (one, three):
        assert times.min_ms <= times.ms <= times.max_ms
        assert times.tokens_per_second == pytest.approx(times.batch / times.ms * 1e3, rel=1e-2)
    assert one.floor_ms == pytest.approx(floor_of(tiny_model).milliseconds(1, 9 + LEAD_TOKENS + 3), abs=1e-4)


def test_table_shows_floors_only_where_there_are_some(tiny_model: Path) -> None:
    times = StepTime(batch=64, ms=2.0, min_ms=1.9, max_ms=2.5, tokens_per_second=32000.0, floor_ms=1.5)
    with cpu_engine(tiny_model) as engine:
        info = engine.info
    for floor_ms, shown in ((1.5, True), (None, False)):
        console = Console(record=True, width=120)
        show([structs.replace(times, floor_ms=floor_ms)], info, 512, console)
        text = console.export_text()
        assert ("75%" in text) is shown
        assert "32,000" in text


def test_batch_sizes_beyond_the_engine_are_refused(tiny_model: Path) -> None:
    with cpu_engine(tiny_model, max_running=8, kv_cache_tokens=1024) as engine:
        require_capacity(engine.info, 8, 100)
        for batch, tokens in ((9, 1), (8, 200)):
            with pytest.raises(InvalidField, match="batch_sizes"):
                require_capacity(engine.info, batch, tokens)


@pytest.mark.parametrize("text", ["", "1,,2", "0", "-1", "two", "1,2.5"])
def test_batch_sizes_that_are_no_integers_are_refused(text: str) -> None:
    with pytest.raises(InvalidField, match="batch_sizes"):
        read_batch_sizes(text)


def test_prompts_beyond_the_model_are_refused_by_the_flag_that_sets_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "steps", "--device", "cpu", "--prompt-tokens", "9999"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        "tok bench: error: --prompt-tokens is 9999; allowed: at most 1024, the model's own, together"
    )


def test_command_prints_json_for_each_batch_size(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "bench steps --device cpu --batch-sizes 1,2 --prompt-tokens 5 --steps 3 --reps 1 --max-running 4 --json"
    assert main([*words.split(), "--kv-cache-tokens", "1024", "--model", str(tiny_model)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["batch"] for line in lines] == [1, 2]
    assert all(line["ms"] != 0 and line["floor_ms"] is None for line in lines)
