"""A start compiles its kernels ahead: they are those that warm-up launches, and a failure changes nothing else.

Kernels are recorded in place of running, for compute capability 9.0, on machines without a GPU.
"""

from __future__ import annotations

import io
import logging
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from support.tiny_models import make_model
from tok_core import EngineConfig
from tok_core.messages import StepInput, VerifyRows
from tok_core.model_config import ModelConfig
from tok_core.models.registry import build
from tok_core.runtime import MANIFEST, compiler_process, is_first_start
from tok_core.worker import cuda_graphs
from tok_core.worker.layer_kinds import different_layers_only
from tok_core.worker.runner import Runner
from tok_core.worker.startup import precompile
from tok_core.worker.startup.dummy_steps import dummy_step, largest_step, largest_step_len, run_dummy_step
from tok_core.worker.startup.memory import StepMemory
from tok_core.worker.startup.precompile import (
    CompileReport,
    CompileRequest,
    Precompilation,
    marker_path,
    meta_runner,
    startup_variants,
)
from tok_core.worker.startup.resolve import mask_words, resolve_model_config, resolve_pack_rows
from tok_core.worker.startup.warmup import warm_up
from tok_core.worker.state import WorkerState
from tok_kernels import launch_config
from tok_kernels.backends.triton import TritonBackend
from tok_kernels.compilation import Variant, record

CPU, CUDA, SLOTS, TOKENS = torch.device("cpu"), torch.device("cuda"), 20, 96
CARD = "NVIDIA H100 80GB HBM3"


@pytest.fixture(scope="module", params=["llama", "llama, speculating", "qwen3-window", "qwen2-moe"])
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    kind, _, speculating = request.param.partition(", ")
    path = make_model(kind, tmp_path_factory.mktemp("precompile") / kind, max_positions=4160)
    return EngineConfig(
        model=str(path),
        load_format="dummy",
        dtype="bfloat16",
        max_running=SLOTS,
        max_step_tokens=TOKENS,
        speculate=4 if speculating else "off",
    )


@pytest.fixture
def gpu_like(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tensors on the CPU pass for those of a Hopper GPU; memory that no kernel writes holds zeros."""

    @contextmanager
    def recording() -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(replay=lambda: None)

    def zeros_like(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **options: make(*args, **options).zero_()

    monkeypatch.setattr(launch_config, "supports_pdl", lambda device: True)
    monkeypatch.setattr(cuda_graphs, "GraphRecorder", lambda device: SimpleNamespace(recording=recording))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, zeros_like(getattr(owner, name)))


def launched_by_warm_up(config: EngineConfig) -> set[tuple[str, str]]:
    """Return the kernels and keys that the start's own measurement and warm-up launch, on the CPU."""
    path = Path(config.model)
    model_config = resolve_model_config(config, path)
    backend, words = TritonBackend(), mask_words(model_config, path)
    with record(90) as variants:
        model = build(model_config, backend, CPU, torch.bfloat16)
        for parameter in model.parameters():
            parameter.data.zero_()
        length = largest_step_len(model_config.max_positions, SLOTS, TOKENS)
        measuring, running = (
            Runner(
                *(model, backend),
                WorkerState(
                    *(model_config, CPU, torch.bfloat16),
                    slots=SLOTS,
                    num_pages=pages,
                    page_size=config.page_size,
                    pages_per_slot=-(-positions // config.page_size),
                    max_draft_tokens=config.max_draft_tokens,
                ),
                max_pack_rows=resolve_pack_rows(config, model_config, backend),
            )
            for pages, positions in ((1, length), (300, model_config.max_positions))
        )
        for step in (largest_step(SLOTS, TOKENS, measuring.max_len, words), dummy_step(decode=1), dummy_step(decode=9)):
            run_dummy_step(measuring, step)
        for rows in (0, SLOTS):
            warm_up(running, StepMemory(step_bytes=1, graph_rows=rows, graph_bytes=0), TOKENS, words)
    return set(variants)


@pytest.mark.usefixtures("gpu_like")
def test_every_variant_that_warm_up_launches_is_compiled_ahead(config: EngineConfig) -> None:
    ahead = {(variant.name, variant.arguments[0]) for variant in startup_variants(config, 90)}
    launched = launched_by_warm_up(config)
    assert len(launched) > 15
    assert sorted(launched - ahead) == []


def test_layer_kinds_launch_the_variants_of_all_layers_scales(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path / "model", layers=3)
    fields = msgspec.json.decode((path / "config.json").read_bytes()) | {"num_key_value_heads": 1}
    (path / "config.json").write_bytes(msgspec.json.encode(fields))
    config = EngineConfig(model=str(path), load_format="dummy", dtype="bfloat16", kv_cache_dtype="fp8", max_running=4)
    runner, step = meta_runner(config), dummy_step(decode=2)
    with record(90) as of_all:
        runner.launch(step)
    runner.reset()
    with record(90) as of_kinds, different_layers_only(runner.model, runner.state):
        runner.launch(step)
    assert of_all.keys() == of_kinds.keys()


def random_step(source: random.Random, slots: int, tokens: int, words: int, *, drafts: bool) -> StepInput:
    rows = source.choice([1, 2, source.randint(3, 40), source.randint(41, slots - 20)])
    chunks = source.choice([0, 1, source.randint(2, 20)])
    groups = source.choice([0, 1, rows // 2]) if rows > 1 else 0
    options = {name: source.choice([0, source.randint(1, rows)]) for name in ("filtered", "penalised", "masked")}
    step = dummy_step(
        decode=rows,
        chunks=chunks,
        tokens=source.choice([chunks, chunks + source.randint(0, tokens)]) if chunks else 0,
        groups=groups,
        prefix=source.choice([64, 1024, 2048]) if groups else 0,
        levels=source.choice([1, 2]) if groups else 1,
        cached=source.choice([0, 100]) if chunks else 0,
        top_logprobs=source.choice([0, 1, 20]),
        greedy=source.random() < 0.2,
        prompt_outputs=bool(chunks) and source.random() < 0.2,
        mask_words=words if options["masked"] else 0,
        **options,
    )
    longest = source.choice([1, 3, 7])
    sequences = source.randint(1, max(1, rows // (1 + longest)))
    if drafts and sequences * (1 + longest) <= rows:
        parent, lent = np.split(step.decode_slot[: sequences * (1 + longest)], [sequences])
        lent = lent.reshape(sequences, longest)
        step.verify_rows = VerifyRows(parent, lent, np.full_like(lent, source.choice([-1, 0])))
    return step


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_no_step_needs_a_kernel_that_the_start_has_not_compiled(config: EngineConfig, cuda_graphs: bool) -> None:
    large = msgspec.structs.replace(config, max_running=2048, max_step_tokens=4096, cuda_graphs=cuda_graphs)
    ahead = {(variant.name, variant.arguments[0]) for variant in startup_variants(large, 90)}
    runner, source = precompile.meta_runner(large), random.Random(0)
    words = mask_words(runner.model.config, Path(config.model))
    with record(90) as launched:
        for _ in range(100):
            runner.reset()
            runner.launch(random_step(source, 2048, 2000, words, drafts=config.speculate != "off"))
    assert sorted(launched.keys() - ahead) == []


def test_prefill_chunks_beside_few_slots_need_no_other_kernel(config: EngineConfig) -> None:
    few = msgspec.structs.replace(config, max_running=16, max_step_tokens=700)
    ahead = {(variant.name, variant.arguments[0]) for variant in startup_variants(few, 90)}
    runner = precompile.meta_runner(few)
    with record(90) as launched:
        for tokens in (*range(1, 70), 95, 129, 191, 257, 383, 513):
            runner.reset()
            runner.launch(dummy_step(chunks=1, tokens=tokens))
    assert sorted(launched.keys() - ahead) == []


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    """Return the configuration of a small engine on a Hopper GPU with an empty cache of kernels."""
    path = make_model("llama", tmp_path / "llama", layers=1)
    config = EngineConfig(model=str(path), load_format="dummy", max_running=4, max_step_tokens=16)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: CARD)
    monkeypatch.setattr(precompile, "_import_flashinfer", lambda: None)  # takes seconds
    return config


@pytest.mark.parametrize("cache_dtype", ["fp8", "fp8_unscaled", "int8"])
def test_variants_are_those_of_the_kv_cache(
    small: EngineConfig, cache_dtype: Literal["fp8", "fp8_unscaled", "int8"]
) -> None:
    keys = [
        {variant.arguments[0] for variant in startup_variants(one, 90) if "decode_attention" in variant.name}
        for one in (small, msgspec.structs.replace(small, kv_cache_dtype=cache_dtype))
    ]
    assert all(keys)
    assert not keys[0] & keys[1]


@pytest.mark.usefixtures("gpu_like")
def test_without_prefix_groups_no_cascade_kernel_is_compiled_or_captured(small: EngineConfig) -> None:
    alone = msgspec.structs.replace(small, prefix_groups=False)
    few, many = ({(one.name, one.arguments[0]) for one in startup_variants(config, 90)} for config in (alone, small))
    assert few < many
    runner = precompile.meta_runner(alone)
    with record(90) as launched:
        runner.graphs.capture([2, 4])
        assert runner.graphs.find(dummy_step(decode=2)) is not None
    assert launched.keys() <= few
    grouped = dummy_step(decode=4, groups=2, prefix=16)
    assert runner.graphs.find(dummy_step(decode=3)) is not None
    assert runner.graphs.find(grouped) is None
    other = precompile.meta_runner(small)
    with record(90):
        other.graphs.capture([2, 4])
    assert other.graphs.find(grouped) is not None


def test_variants_are_those_of_the_engine_configuration(small: EngineConfig) -> None:
    processed = msgspec.structs.replace(small, logprobs_mode="processed_logprobs")
    keys = [
        {variant.arguments[0] for variant in startup_variants(one, 90) if "block_sampling" in variant.name}
        for one in (small, processed)
    ]
    assert keys[0] != keys[1]


def run_main(request: CompileRequest, monkeypatch: pytest.MonkeyPatch) -> CompileReport:
    stdout = SimpleNamespace(buffer=io.BytesIO())
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(msgspec.json.encode(request))))
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(logging, "disable", lambda: None)
    precompile.main()
    for kernel in launch_config.card_launches(request.card) or ():  # this process uses the table's launches from now on
        launch_config.remove_override(kernel)
    return msgspec.json.decode(stdout.buffer.getvalue().lstrip(), type=CompileReport)


def test_marker_is_written_once_all_kernels_are_compiled(small: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    results = iter([["rope_kernel: RuntimeError: no compiler"], []])

    def compile_variants(variants: list[object], processes: int) -> list[str]:
        calls.append(len(variants))
        return next(results)

    monkeypatch.setattr(precompile, "compile_variants", compile_variants)
    marker = marker_path(small, CARD, 90)
    request = CompileRequest(small, CARD, 90, str(marker))
    report = run_main(request, monkeypatch)
    assert report.errors == ["rope_kernel: RuntimeError: no compiler"]
    assert not marker.exists()
    assert run_main(request, monkeypatch).errors == []
    assert marker.exists()
    assert run_main(request, monkeypatch).errors == []
    assert calls == [report.variants] * 2  # the third process found the marker


def test_kernels_are_compiled_with_the_launches_measured_on_the_card(
    small: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[set[object]] = []

    def compile_variants(variants: list[Variant], processes: int) -> list[str]:
        compiled.append({one.arguments[0] for one in variants if "decode_attention" in one.name})
        return ["not compiled"]  # leaves no marker

    monkeypatch.setattr(precompile, "compile_variants", compile_variants)
    monkeypatch.setattr(precompile, "resolve_model_config", heads_of_64)
    for card in ("NVIDIA H200", CARD):
        run_main(CompileRequest(small, card, 90, str(marker_path(small, card, 90))), monkeypatch)
    assert not compiled[0] & compiled[1]


def heads_of_64(config: EngineConfig, path: Path) -> ModelConfig:
    return replace(resolve_model_config(config, path), head_dim=64)


def test_marker_depends_on_what_decides_the_kernels(small: EngineConfig) -> None:
    markers = {
        marker_path(one, card, capability)
        for one in (small, msgspec.structs.replace(small, speculate=3), msgspec.structs.replace(small, page_size=8))
        for card, capability in ((CARD, 90), ("NVIDIA H100 PCIe", 90), ("NVIDIA B200", 100))
    }
    assert len(markers) == 9
    same = msgspec.structs.replace(small, run_ahead=3, max_running=3, max_step_tokens=80, max_model_len=99)
    assert marker_path(same, CARD, 90) in markers


def test_sizes_change_few_kernels_of_a_start(small: EngineConfig) -> None:
    first, second = (
        {(one.name, one.arguments[0]) for one in startup_variants(msgspec.structs.replace(small, **size), 90)}
        for size in (
            {"max_running": 300, "max_step_tokens": 4096, "max_model_len": 100},
            {"max_running": 900, "max_step_tokens": 5000},
        )
    )
    assert len(first ^ second) <= 5


def test_process_that_cannot_compile_is_logged_and_the_start_goes_on(
    small: EngineConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "model"
    broken.mkdir()
    (broken / "config.json").write_text('{"architectures": ["Unknown"]}', encoding="utf-8")
    Precompilation(msgspec.structs.replace(small, model=str(broken)), CUDA, 1).wait()
    (line,) = caplog.messages
    assert line.startswith("kernels are compiled at their first launch: ModelError: ")


@pytest.mark.parametrize("program", ["/bin/false", "/no/such/program"])
def test_process_that_cannot_run_is_logged_and_the_start_goes_on(
    small: EngineConfig, program: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", program)
    Precompilation(small, CUDA, 1).wait()
    (line,) = caplog.messages
    assert line.startswith("kernels are compiled one by one: the compiling process ")


ECHO = """
import sys, msgspec
request = msgspec.json.decode(sys.stdin.buffer.read())
sys.stdout.write("imported" + chr(10) + msgspec.json.encode(
    {"variants": 1, "seconds": 0.0, "errors": [f"{request['card']} {request['environment']}"]}).decode())
"""


def python(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_process_that_started_with_the_worker_gets_the_request(
    small: EngineConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Precompilation(small, CUDA, 1, python(ECHO)).wait()
    (line,) = caplog.messages
    environment = {"TRITON_CACHE_DIR": str(tmp_path / "triton")}
    assert line == f"kernels are compiled at their first launch: {CARD} {environment}"


def test_process_that_started_with_the_worker_ends_if_it_is_not_needed(small: EngineConfig) -> None:
    compiler = python("import time; time.sleep(600)")
    Precompilation(small, CPU, 1, compiler).wait()
    assert compiler.returncode is not None


def test_process_ends_if_the_start_fails_before_it_waits(small: EngineConfig) -> None:
    compiler = python("import time; time.sleep(600)")
    with pytest.raises(ValueError, match="no such model"), Precompilation(small, CUDA, 1, compiler):
        raise ValueError("no such model")
    assert compiler.returncode is not None
    assert compiler.stdout is not None
    assert compiler.stdout.closed


def test_start_waits_no_longer_than_its_limit_for_compiling_children(
    small: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = python("import os, time; os.fork(); time.sleep(20)")
    monkeypatch.setattr(precompile, "MAX_WAIT_SECONDS", 0.5)
    began = time.monotonic()
    Precompilation(small, CUDA, 1, compiler).wait()
    assert time.monotonic() - began < 15
    assert compiler.returncode is not None
    (line,) = caplog.messages
    assert line.startswith("kernels are compiled one by one: the compiling process failed")


def test_process_that_ended_before_the_request_is_reaped(small: EngineConfig, caplog: pytest.LogCaptureFixture) -> None:
    compiler = python("")
    while compiler.poll() is None:
        time.sleep(0.01)
    Precompilation(small, CUDA, 1, compiler).wait()
    assert compiler.stdout is not None
    assert compiler.stdout.closed
    (line,) = caplog.messages
    assert line.startswith("kernels are compiled one by one: ")


def test_compiling_process_without_a_request_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = io.BytesIO()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO()))
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(buffer=stdout))
    monkeypatch.setattr(logging, "disable", lambda: None)
    precompile.main()
    assert stdout.getvalue() == b""


def test_first_start_is_one_on_a_gpu_without_kernels_of_another(
    small: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_process, "GPU_DRIVER", tmp_path / "driver")
    assert not is_first_start(None)
    (tmp_path / "driver").touch()
    directory = str(tmp_path / "kernels")
    assert is_first_start(None)
    assert is_first_start(directory)
    marker = marker_path(small, CARD, 90)
    marker.parent.mkdir()
    marker.touch()
    assert not is_first_start(None)
    assert is_first_start(directory)
    part = tmp_path / "kernels" / "part"
    part.mkdir(parents=True)
    (part / MANIFEST).touch()
    assert not is_first_start(directory)


def test_nothing_is_compiled_ahead_where_the_kernels_are_there_or_unknown(
    small: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/program")
    Precompilation(small, CPU, 1).wait()
    Precompilation(small, CUDA, 2).wait()
    Precompilation(msgspec.structs.replace(small, backend="reference"), CUDA, 1).wait()
    marker = marker_path(small, CARD, 90)
    marker.parent.mkdir()
    marker.touch()
    Precompilation(small, CUDA, 1).wait()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    Precompilation(msgspec.structs.replace(small, page_size=8), CUDA, 1).wait()
    assert caplog.messages == []
