"""Warm-up steps stay within the page tables and the model's positions for every size of an engine.

On a CPU a position outside of either is an error; a GPU would read past the table, or end the process.
"""

from __future__ import annotations

from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from torch import Tensor

from support.tiny_models import make_model
from tok_core.config import RankCoordinates
from tok_core.messages import StepInput, StepOutput
from tok_core.model_config.model_config import read_config
from tok_core.models.decoder import DecoderLayer
from tok_core.models.layers import MLP
from tok_core.models.registry import build
from tok_core.models.weights.loading import load_checkpoint
from tok_core.worker import sampling
from tok_core.worker.cuda_graphs import graph_sizes, total_graph_rows
from tok_core.worker.draft_model import DraftModelRunner
from tok_core.worker.runner import Runner
from tok_core.worker.startup import memory
from tok_core.worker.startup.dummy_steps import dummy_step, largest_step, largest_step_len, run_dummy_step
from tok_core.worker.startup.memory import DRIVER_GRAPH_BYTES, SLACK, StepMemory, largest_graph_rows, measure_steps
from tok_core.worker.startup.warmup import draft_steps_of, row_counts, warm_up, warm_up_gemms, warm_up_steps
from tok_core.worker.state import WorkerState, page_table_bytes
from tok_kernels import Sampled, SamplingBatch, choose
from tok_kernels.backends.reference import ReferenceBackend

CPU = torch.device("cpu")
# slots, tokens of a step, the model's positions, tokens of a page
SIZES = [(1, 64, 24, 16), (1, 1, 2, 4), (2, 40, 20, 32), (3, 700, 600, 16), (3, 64, 16, 4), (20, 24, 64, 16)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("warmup")


def runner_of(directory: Path, slots: int, positions: int, page_size: int, length: int) -> Runner:
    """Return a runner on the reference backend with one page, and page tables for `length` positions."""
    path = directory / str(positions)
    if not path.exists():
        make_model("llama", path, max_positions=positions, layers=1)
    config, backend = read_config(path), choose(CPU)
    model = build(config, backend, CPU, torch.float32)
    load_checkpoint(model, path)
    pages = -(-length // page_size)
    sizes: dict[str, Any] = {"slots": slots, "num_pages": 1, "page_size": page_size, "pages_per_slot": pages}
    return Runner(model, backend, WorkerState(config, CPU, torch.float32, **sizes))


@pytest.mark.parametrize(("slots", "tokens", "positions", "page_size"), SIZES)
def test_every_warm_up_step_fits_the_engine_sizes(
    directory: Path, slots: int, tokens: int, positions: int, page_size: int
) -> None:
    runner = runner_of(directory, slots, positions, page_size, positions)
    assert runner.max_len == positions <= runner.state.max_len
    words = -(-runner.model.config.vocab_size // 32)
    steps = warm_up_steps(slots, tokens, runner.max_len, page_size, words)
    assert {len(step.mask_row) for step in steps} >= {0, 1, min(slots, tokens)}
    assert not any(len(step.mask_row) for step in warm_up_steps(slots, tokens, runner.max_len, page_size))
    for step in steps:
        assert len(step.decode_slot) + len(step.prefill_token) <= tokens
        output = run_dummy_step(runner, step)
        assert len(output.token) == len(step.sample_slot)


@pytest.mark.parametrize(("slots", "tokens", "positions", "page_size"), SIZES)
def test_measured_step_is_the_largest_that_sequences_can_fill(
    directory: Path, slots: int, tokens: int, positions: int, page_size: int
) -> None:
    runner = runner_of(directory, slots, positions, page_size, largest_step_len(positions, slots, tokens))
    step = largest_step(slots, tokens, runner.max_len)
    assert len(step.prefill_token) == min(tokens, slots * positions)
    assert step.prefill_count.max() <= positions
    assert len(run_dummy_step(runner, step).token) == min(slots, tokens)
    # Later trial steps do not continue sequences that earlier ones left.
    assert largest_graph_rows(runner) in graph_sizes(slots)
    assert slots == 1 or int(runner.state.columns.length.max()) == 1


@pytest.mark.parametrize(("slots", "tokens", "positions", "page_size"), SIZES)
def test_warm_up_drafts_fit_the_sizes_of_engine_and_draft_model(
    directory: Path, slots: int, tokens: int, positions: int, page_size: int
) -> None:
    runner = runner_of(directory, slots, positions, page_size, positions)
    assert draft_steps_of(runner, tokens) == []
    runner.draft_model = DraftModelRunner(runner.model, runner.backend, runner.state, 512)
    steps = draft_steps_of(runner, tokens)
    assert len(steps) > 2
    for step in steps:
        assert step.drafts is not None
        assert len(step.drafts.chunk_token) <= tokens
        assert max(step.drafts.end.max(), step.drafts.chunk_count.max(initial=0)) <= step.max_kv <= positions
        output = run_dummy_step(runner, step)
        assert output.draft_token.shape == step.drafts.lent.shape == (len(step.decode_slot), 2)
    assert len(steps[0].drafts.chunk_token) == tokens  # type: ignore[union-attr]


@pytest.mark.parametrize("max_pack_rows", [1, 4])
def test_graphs_with_packs_are_measured_beside_a_draft_model(
    max_pack_rows: int, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, steps = runner_of(directory, 8, 64, 16, 64), list[StepInput]()
    runner.max_pack_rows = runner.graphs._max_pack_rows = max_pack_rows
    packs = max_pack_rows > 1
    runner.draft_model = DraftModelRunner(runner.model, runner.backend, runner.state, 512)

    def peak_bytes(runner: Runner, step: StepInput) -> int:
        run_dummy_step(runner, step)
        steps.append(step)
        return 0

    monkeypatch.setattr(memory, "_peak_bytes", peak_bytes)
    monkeypatch.setattr(memory, "largest_graph_rows", lambda runner: 8)
    measured = measure_steps(runner, 32, graphs=True)
    assert any(step.moves is not None and step.max_kv == 64 for step in steps) == packs
    sets, row_bytes = 1 + packs, runner.model.config.hidden_size * 4 + 8
    assert measured.drafts == packs
    assert measured.graph_bytes == sets * total_graph_rows(8) * row_bytes
    assert measured.activations == int(measured.graph_bytes * SLACK) + sets * DRIVER_GRAPH_BYTES


@pytest.mark.parametrize(("row_seconds", "fast_launches", "rows"), [(3e-6, 5, 1024), (1e-5, 1000, 384)])
def test_graph_rows_do_not_shrink_when_the_host_becomes_slower(
    row_seconds: float, fast_launches: int, rows: int, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch takes the host 2 ms, and 6 ms after `fast_launches`."""
    runner, number = runner_of(directory, 1024, 24, 16, 24), count()

    def timed_step(runner: Runner, step: StepInput) -> StepOutput:
        launch = 2e-3 if next(number) < fast_launches else 6e-3
        device = max(launch, row_seconds * len(step.decode_slot))
        return structs.replace(run_dummy_step(runner, step), launch_seconds=launch, device_seconds=device)

    monkeypatch.setattr(memory, "run_dummy_step", timed_step)
    assert largest_graph_rows(runner) == rows


def test_memory_estimate_counts_page_tables_and_cuda_graph_rows(directory: Path) -> None:
    state = runner_of(directory, 3, 24, 16, 17).state
    assert page_table_bytes(3, 17, 16) == state.columns.page_table.nbytes
    # With prefix groups and without; up to 512 rows for short contexts and for long ones.
    assert total_graph_rows(576) == 2 * 576 + 4 * sum(size for size in graph_sizes(576) if size <= 512)
    assert total_graph_rows(576, drafts=True) == 2 * total_graph_rows(576)


@pytest.mark.parametrize(("size", "blocks"), [(20, [20]), (8, [8, 8, 4])])
def test_rows_sampled_in_blocks_equal_rows_sampled_at_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch, size: int, blocks: list[int]
) -> None:
    runner, rows, sample = runner_of(directory, 20, 64, 16, 64), list[int](), ReferenceBackend.sample
    words = -(-runner.model.config.vocab_size // 32)
    step = dummy_step(decode=20, masked=20, mask_words=words, filtered=20, penalised=20, top_logprobs=2)
    expected = run_dummy_step(runner, step)

    def recording(logits_RV: Tensor, batch: SamplingBatch) -> Sampled:
        rows.append(len(logits_RV))
        return sample(logits_RV, batch)

    monkeypatch.setattr(ReferenceBackend, "sample", staticmethod(recording))
    monkeypatch.setattr(sampling, "MAX_SAMPLED_ROWS", size)
    monkeypatch.setattr(sampling, "MAX_GATHERED_ROWS", 4)  # counts for sharded vocabularies only
    output = run_dummy_step(runner, step)
    assert rows == blocks
    for name in ("token", "logprob", "top_token", "top_logprob"):
        np.testing.assert_array_equal(getattr(output, name), getattr(expected, name))


@pytest.mark.parametrize("coordinates", [RankCoordinates(), RankCoordinates(0, 2), RankCoordinates(1, 2)], ids=str)
def test_gemm_warm_up_runs_each_row_count_once_in_a_pipeline(
    directory: Path, monkeypatch: pytest.MonkeyPatch, coordinates: RankCoordinates
) -> None:
    path = make_model("llama", directory / f"stage {coordinates.stage} of {coordinates.stages}")
    model = build(read_config(path), choose(CPU), CPU, torch.float32, coordinates)
    for parameter in model.parameters():
        parameter.data.zero_()
    layer = next(iter(model.model.layers.values()))
    assert isinstance(layer, DecoderLayer)
    attention, mlp = layer.self_attn, layer.mlp
    assert isinstance(mlp, MLP)
    rows: dict[int, list[int]] = {linear.weight.data_ptr(): [] for linear in (attention.qkv_proj, attention.o_proj)}
    rows[mlp.down_proj.weight.data_ptr()] = []
    linear, logits = ReferenceBackend.linear, list[int]()

    def count(x: Tensor, weight: Tensor, *rest: Any, **options: Any) -> Tensor:
        rows[weight.data_ptr()].append(len(x))
        return linear(x, weight, *rest, **options)

    monkeypatch.setattr(ReferenceBackend, "linear", staticmethod(count))
    monkeypatch.setattr(model, "logits", lambda x: logits.append(len(x)))
    warm_up_gemms(model, 100, 9)
    several = coordinates.stages > 1
    assert logits == [*range(1, 10)] * (several and coordinates.last)
    assert list(rows.values()) == [[*range(1, 101)] * several] * 3


def test_warm_up_covers_the_gemm_row_counts_of_all_possible_steps(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    runner, asked = runner_of(directory, 3, 64, 16, 64), []
    monkeypatch.setattr("tok_core.worker.startup.warmup.warm_up_gemms", lambda model, *most: asked.append(most))
    for tokens in (100, 700):
        warm_up(runner, StepMemory(step_bytes=1, graph_rows=0, graph_bytes=0), tokens)
    assert asked == [(100, 3), (3 * 64, 3)]


@given(st.integers(1, 9000), st.sampled_from([16, 64]))
def test_gemm_warm_up_row_counts_leave_no_large_gaps(most: int, step: int) -> None:
    found = row_counts(most, step)
    assert found[:1024] == [*range(1, min(most, 1024) + 1)]
    assert found[-1] == most
    for kind, apart in ((found, step), ([rows for rows in found if rows % 8], 64)):
        assert all(0 < after - before <= apart for before, after in pairwise(kind))
