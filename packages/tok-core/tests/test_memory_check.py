"""A model that does not fit into the memory is refused before it is loaded, with numbers and remedies."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from msgspec import structs

from support.quantized_models import SCHEMES, write_quantized
from support.tiny_models import KINDS, make_model
from tok_core import AsyncEngine, Engine, EngineConfig, EngineError, InvalidField
from tok_core.config import Quantization, RankCoordinates, all_coordinates
from tok_core.model_config import read_config
from tok_core.models import build
from tok_core.parallel import ProcessGroups
from tok_core.quantization import read_quantization
from tok_core.runtime import available_memory, host_memory
from tok_core.worker.startup import memory as startup_memory
from tok_core.worker.startup.memory import MemoryNeeds, require_memory
from tok_kernels import choose

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def config(path: Path) -> EngineConfig:
    return EngineConfig(model=str(path), device="cpu", max_running=4)


def make_free(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let this host have `count` free bytes, and its other processes none."""
    memory = psutil.virtual_memory()._replace(available=count)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(host_memory, "OWN_GROUPS", Path("/nowhere"))
    monkeypatch.setattr(startup_memory, "memory_of_siblings", lambda: 0)


def needs_of(config: EngineConfig, dtype: torch.dtype = torch.float32) -> MemoryNeeds:
    return MemoryNeeds.of(config, read_config(Path(config.model)), dtype, RankCoordinates())


def require(config: EngineConfig, device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> None:
    """Check the memory as the only worker of a replica does."""
    peers = ProcessGroups(RankCoordinates(), device)
    require_memory(config, read_config(Path(config.model)), dtype, peers, config.dp)


def check_counted_weights(path: Path, pp: int, tp: int, name: Quantization = "auto") -> None:
    config, model = EngineConfig(model=str(path), quantization=name), read_config(path)
    quantization = read_quantization(path, name)
    for worker in all_coordinates(pp, tp):
        for dtype in (torch.float32, torch.bfloat16):
            built = build(model, choose(CPU), CPU, dtype, worker, None, quantization)
            tensors = [*built.parameters(), *built.buffers()]
            held = sum(one.untyped_storage().nbytes() for one in tensors)
            assert MemoryNeeds.of(config, model, dtype, worker).weights == held


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (2, 2)])
def test_counted_weights_are_those_of_the_built_model(kind: str, pp: int, tp: int, tmp_path: Path) -> None:
    check_counted_weights(make_model(kind, tmp_path / kind), pp, tp)
    check_counted_weights(tmp_path / kind, pp, tp, "fp8")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_counted_weights_of_a_quantised_model_are_those_of_the_built_one(scheme: str, tmp_path: Path) -> None:
    check_counted_weights(write_quantized("llama-untied", tmp_path, scheme)[0], 1, 2)


def test_model_larger_than_free_memory_is_refused_before_it_is_opened(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = json.loads((path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**written, "tie_word_embeddings": False}))
    empty = EngineConfig(model=str(tmp_path), device="cpu")  # loading it would raise ModelError
    make_free(monkeypatch, needs_of(empty).total - 1)
    with pytest.raises(EngineError, match="does not fit: it needs"):
        Engine(empty, in_process=True)


def test_model_that_just_fits_is_served(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    make_free(monkeypatch, needs_of(config).total)
    with Engine(config, in_process=True) as engine:
        assert engine.info.num_pages >= 1


def test_error_gives_the_numbers_and_the_dtype_that_fits(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    needs, half = needs_of(config), needs_of(config, torch.bfloat16).total
    make_free(monkeypatch, half)
    with pytest.raises(EngineError) as error:
        require(config)
    weights, cache, free = (f"{count / 2**20:.1f} MiB" for count in (needs.weights, needs.cache, half))
    assert str(error.value) == (
        f"{config.model} does not fit: it needs {weights} for weights in float32 and {cache} for the smallest KV "
        f"cache, but only {free} of this host's memory are free; use --dtype bfloat16 or a smaller model"
    )
    require(config, dtype=torch.bfloat16)
    rounded = structs.replace(config, quantization="fp8")
    fp8 = needs_of(rounded).total
    assert half < fp8  # the embedding is most of this model
    make_free(monkeypatch, fp8)
    require(rounded)
    with pytest.raises(EngineError, match="free; use --dtype bfloat16 or --quantization fp8 or a smaller model"):
        require(config)
    make_free(monkeypatch, half - 1)
    with pytest.raises(EngineError, match="free; use a smaller model"):
        require(config)


def test_all_replicas_on_a_host_count(config: EngineConfig, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    three = EngineConfig(model=str(path), device="cpu", dp=3)
    make_free(monkeypatch, 2 * needs_of(three).total)
    require(config)
    with pytest.raises(
        EngineError,
        match=r"3 workers on this host need .*; use --dtype bfloat16 or --quantization fp8 or --dp 2 or a smaller",
    ):
        require(three)
    # One replica restarts while the others hold their weights.
    monkeypatch.setattr(startup_memory, "memory_of_siblings", lambda: needs_of(three).total)
    require(three)


@pytest.mark.parametrize("field", ["kv_cache_tokens", "max_model_len"])
def test_lengths_that_do_not_fit_beside_the_weights_are_refused_by_name(
    field: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def config(tokens: int) -> EngineConfig:
        options: dict[str, Any] = {field: tokens}
        return EngineConfig(model=str(path), device="cpu", **options)

    needs = needs_of(config(100))
    make_free(monkeypatch, needs.weights + 100 * needs.per_token)
    require(config(100))
    with pytest.raises(InvalidField, match=f"{field} is 101; allowed: at most 100, by the memory beside the weights"):
        require(config(101))


def test_device_memory_is_bounded_by_the_fraction_and_more_ranks_are_named(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(model=str(path))
    total = int(needs_of(config, torch.bfloat16).total / 0.9) + 2
    for held in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, held, lambda _: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (total, total))
    require(config, GPU, torch.bfloat16)
    with pytest.raises(
        EngineError, match=r"of cuda:0 are free \(--gpu-memory-fraction\); use --dtype b.* or --tp 4 or"
    ):
        require(config, GPU, torch.float32)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (total - 9, total))  # another process takes 9 bytes
    with pytest.raises(EngineError, match="use --quantization fp8 or --tp 2 or a smaller model"):
        require(config, GPU, torch.bfloat16)
    # The fraction does not bound an engine whose cache is configured.
    require(EngineConfig(model=str(path), kv_cache_tokens=32), GPU, torch.bfloat16)


async def test_workers_refuse_a_model_larger_than_this_machine(path: Path, tmp_path: Path) -> None:
    written = json.loads((path / "config.json").read_text())
    large = {
        **written,
        "num_hidden_layers": 1000,
        "hidden_size": 1 << 14,
        "head_dim": 128,
        "intermediate_size": 1 << 17,
    }
    (tmp_path / "config.json").write_text(json.dumps(large))
    engine = AsyncEngine(EngineConfig(model=str(tmp_path), device="cpu", load_format="dummy", tp=2))
    with pytest.raises(EngineError, match=r"2 workers on this host need \d{5}\.\d GiB for weights in float32"):
        await engine.start()
    await engine.close()


def write_group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("memory_", "memory.")).write_text(text)


@pytest.mark.parametrize(
    ("line", "folder", "files"),
    [
        (
            "0::/",
            "",
            {"memory_max": "1000", "memory_current": "700", "memory_stat": "active_file 40\ninactive_file 60"},
        ),
        (
            *("5:cpu:/x\n4:memory:/docker/1\n0::/", "memory"),
            {
                "memory_limit_in_bytes": "1000",
                "memory_usage_in_bytes": "700",
                "memory_stat": "inactive_file 9\ntotal_active_file 40\ntotal_inactive_file 60",
            },
        ),
    ],
    ids=["version 2", "version 1, as a container sees it"],
)
def test_limit_of_a_control_group_counts_without_file_caches(
    line: str, folder: str, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own").write_text(line + "\n")
    monkeypatch.setattr(host_memory, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(host_memory, "GROUPS", tmp_path / "groups")
    assert available_memory() > 1000
    write_group(tmp_path / "groups" / folder, **files)
    assert available_memory() == 400


def test_limits_of_groups_around_this_one_count_and_no_limit_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own").write_text("0::/user/session\n")
    monkeypatch.setattr(host_memory, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(host_memory, "GROUPS", tmp_path)
    write_group(tmp_path / "user" / "session", memory_max="max", memory_current="500", memory_stat="")
    assert available_memory() > 2000
    write_group(tmp_path / "user", memory_max="2000", memory_current="1500", memory_stat="")
    assert available_memory() == 500
    write_group(tmp_path / "user", memory_max="1000", memory_current="1500", memory_stat="")
    assert available_memory() == 0


def test_memory_of_siblings_is_what_they_hold_beyond_this_process() -> None:
    holds = "held = bytearray(1 << 28); print(flush=True); input()"
    asks = "from tok_core.runtime import memory_of_siblings; print(memory_of_siblings())"

    def asked() -> int:
        return int(subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, check=True).stdout)

    without = asked()
    command = [sys.executable, "-c", holds]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as sibling:
        assert sibling.stdout is not None
        sibling.stdout.readline()
        found = asked() - without
        sibling.communicate(b"\n")
    assert 1 << 27 < found <= (1 << 28) + (1 << 24)
