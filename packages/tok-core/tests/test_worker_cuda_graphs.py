"""CUDA graphs are captured by the steps that need them; what a capture records is replaced by nothing here."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from support.tiny_models import make_model
from tok_core.config import RankCoordinates
from tok_core.errors import EngineError
from tok_core.messages import MemoryTask
from tok_core.model_config import read_config
from tok_core.models import CausalLM, build, load_checkpoint
from tok_core.worker import cuda_graphs
from tok_core.worker.cuda_graphs import DecodeGraphs
from tok_core.worker.layer_kinds import different_layers, different_layers_only
from tok_core.worker.runner import Runner
from tok_core.worker.sampling import MAX_SAMPLED_ROWS
from tok_core.worker.sleep import SleepingMemory
from tok_core.worker.staging import Staging
from tok_core.worker.startup.dummy_steps import dummy_step, dummy_verify_rows, run_dummy_step
from tok_core.worker.state import WorkerState
from tok_kernels import choose

CPU, SIZES, LONG = torch.device("cpu"), [1, 2, 4, 8], 3000


@dataclass
class Recorder:
    """Stand-in for the recorder of CUDA graphs, which counts captures and finds no memory after `most` of them."""

    captured: int = 0
    most: int = 1000
    error: RuntimeError = field(default_factory=lambda: torch.OutOfMemoryError("none"))

    @contextmanager
    def recording(self) -> Iterator[SimpleNamespace]:
        if self.captured == self.most:
            raise self.error
        self.captured += 1
        yield SimpleNamespace(replay=lambda: None)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(cuda_graphs, "GraphRecorder", lambda device: recorder)
    return recorder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    path = make_model("llama", tmp_path_factory.mktemp("graphs") / "llama", layers=3, max_positions=4096)
    model = build(read_config(path), choose(CPU), CPU, torch.float32)
    load_checkpoint(model, path)
    return model


def state_of(model: CausalLM) -> WorkerState:
    return WorkerState(model.config, CPU, torch.float32, slots=8, num_pages=1, page_size=16, pages_per_slot=256)


@pytest.fixture
def graphs(model: CausalLM, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> DecodeGraphs:
    monkeypatch.setattr(cuda_graphs, "MAX_STALL_SECONDS", np.inf)  # a capture may take long on a busy machine
    return graphs_of(model)


def graphs_of(model: CausalLM, coordinates: RankCoordinates | None = None) -> DecodeGraphs:
    return DecodeGraphs(model, choose(CPU), state_of(model), Staging(CPU, 2), coordinates or RankCoordinates())


def test_start_captures_the_largest_graphs_and_steps_the_others_once(graphs: DecodeGraphs) -> None:
    graphs.capture(SIZES)
    assert len(graphs) == 4  # with groups and without, for short contexts and for long ones
    found = [graphs.find(dummy_step(decode=rows)) for rows in (3, 4, 8, 3)]
    assert [graph and graph.key.rows for graph in found] == [4, 4, 8, 4]
    assert found[0] is found[1] is found[3]
    assert len(graphs) == 5
    for step in (dummy_step(decode=4, groups=2, prefix=16), dummy_step(decode=4, cached=LONG, prefix=LONG)):
        assert graphs.find(step) is graphs.find(step) is not found[0]
    assert len(graphs) == 7


@pytest.mark.parametrize("shared", [True, False])
def test_graph_of_rows_sampled_in_blocks_samples_the_same_tokens(
    graphs: DecodeGraphs, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    step, sampled = dummy_step(decode=8, groups=int(shared), prefix=16 * shared), list[list[int]]()
    for size in (MAX_SAMPLED_ROWS, 3):
        monkeypatch.setattr(cuda_graphs, "MAX_SAMPLED_ROWS", size)
        graphs.capture(SIZES)
        graph = graphs.find(step)
        assert graph is not None
        sampled.append(graph.sampled_tokens.flatten().tolist())
    assert len(sampled[0]) == 2 * 8
    assert sampled[0] == sampled[1]


def test_steps_with_drafts_replay_other_graphs_whose_rows_form_packs(
    model: CausalLM, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "MAX_STALL_SECONDS", np.inf)
    graphs = DecodeGraphs(model, choose(CPU), state_of(model), Staging(CPU, 2), RankCoordinates(), max_pack_rows=4)
    graphs.capture(SIZES)
    assert len(graphs) + graphs.missing == 2 * 4 * 3 + 2  # a single row verifies no draft
    plain, verifying = graphs.find(dummy_step(decode=4)), graphs.find(dummy_verify_rows(3))
    assert plain is not None
    assert verifying is not None
    assert not plain.key.drafts
    assert "packs" not in plain.arrays(dummy_step(decode=4))
    assert verifying.key == plain.key._replace(drafts=True)
    packs = verifying.arrays(dummy_verify_rows(2))["packs"]
    assert packs.tolist() == [[0, 1, 2, -1], [3, -1, -1, -1], [-1] * 4, [-1] * 4]


def test_idle_worker_captures_all_graphs_one_by_one(graphs: DecodeGraphs) -> None:
    graphs.capture(SIZES)
    assert graphs.missing == 10
    assert graphs.find(dummy_step(decode=2)) is not None
    assert graphs.missing == 9
    assert graphs.take_capture_seconds() > 0
    graphs.suspend(True)
    assert graphs.missing == 0
    graphs.suspend(False)
    for left in (*range(8, -1, -1), 0):
        graphs.capture_missing()
        assert graphs.missing == left
    assert len(graphs) == 14
    assert graphs.take_capture_seconds() == 0


def test_steps_that_no_graph_replays_capture_none(graphs: DecodeGraphs) -> None:
    graphs.capture(SIZES)
    nested, prefill = dummy_step(decode=4, groups=2, prefix=32, levels=2), dummy_step(decode=1, chunks=1, tokens=2)
    for step in (nested, prefill, dummy_step(decode=9), dummy_step(decode=1, groups=1, prefix=16)):
        assert graphs.find(step) is None
    assert len(graphs) == 4


@pytest.mark.parametrize("several", [True, False], ids=["several workers", "slow captures"])
def test_all_graphs_are_captured_where_late_captures_would_hurt(
    several: bool, model: CausalLM, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not several:
        monkeypatch.setattr(cuda_graphs, "MAX_STALL_SECONDS", 0.0)
    graphs = graphs_of(model, RankCoordinates(ranks=2) if several else None)
    graphs.capture(SIZES)
    assert len(graphs) == 4 * 3 + 2  # a single row is in no group
    captured = recorder.captured
    assert graphs.find(dummy_step(decode=1)) is not None
    assert recorder.captured == captured


def test_steps_go_on_without_graphs_if_no_memory_is_left(
    graphs: DecodeGraphs, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    graphs.capture(SIZES)
    recorder.most = recorder.captured
    with caplog.at_level(logging.WARNING):
        assert [graphs.find(dummy_step(decode=rows)) for rows in (1, 2, 4, 1)] == [None] * 4
    assert graphs.missing == 0
    (line,) = caplog.messages
    assert line.startswith("no memory is left for further CUDA graphs")
    assert graphs.find(dummy_step(decode=7)) is not None


def test_driver_without_memory_for_a_graph_ends_captures_only(graphs: DecodeGraphs, recorder: Recorder) -> None:
    graphs.capture(SIZES)
    recorder.most, recorder.error = recorder.captured, RuntimeError("CUDA error: out of memory")
    assert graphs.find(dummy_step(decode=1)) is None
    assert graphs.missing == 0


def test_other_errors_of_a_capture_are_raised(graphs: DecodeGraphs, recorder: Recorder) -> None:
    graphs.capture(SIZES)
    recorder.most, recorder.error = recorder.captured, RuntimeError("CUDA error: an illegal memory access")
    with pytest.raises(RuntimeError, match="illegal"):
        graphs.find(dummy_step(decode=1))


def test_graphs_of_other_weights_are_discarded_by_a_second_wake_up(
    graphs: DecodeGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(sizes: list[int]) -> None:
        raise torch.OutOfMemoryError("none")

    graphs.capture(SIZES)
    before = graphs.find(dummy_step(decode=8))
    graphs.suspend(True)
    graphs.capture_again()
    with monkeypatch.context() as patch:
        patch.setattr(graphs, "launch_eagerly", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            graphs.suspend(False)
    graphs.suspend(True)  # the engine sleeps again
    graphs.suspend(False)
    assert graphs.find(dummy_step(decode=8)) not in (None, before)


def test_failed_sleep_leaves_no_graph_to_capture_on_released_memory(
    graphs: DecodeGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*, keep: bool) -> None:
        raise EngineError("none")

    graphs.capture(SIZES)
    memory = SleepingMemory(CPU)
    monkeypatch.setattr(memory.kv_cache, "release", fail)
    assert memory.execute(MemoryTask("sleep", ("weights", "kv_cache"), keep=False), graphs.suspend).error
    assert memory.weights.released
    assert graphs.missing == 0
    assert not memory.execute(MemoryTask("wake_up", ("weights", "kv_cache"), keep=False), graphs.suspend).error
    assert graphs.missing > 0


def test_graphs_are_captured_again_once_memory_is_back(graphs: DecodeGraphs, recorder: Recorder) -> None:
    graphs.capture(SIZES)
    before = graphs.find(dummy_step(decode=2))
    graphs.suspend(True)
    graphs.capture_again()
    captured = recorder.captured
    graphs.suspend(False)
    assert recorder.captured > captured
    after = graphs.find(dummy_step(decode=2))
    assert after is not None
    assert after is not before


def test_runner_runs_one_layer_of_each_kind_within_the_context(model: CausalLM) -> None:
    state = state_of(model)
    runner, layers, caches = Runner(model, choose(CPU), state), model.model.layers, state.caches
    with different_layers_only(model, state):
        assert list(model.model.layers) == ["0"] == [str(number) for number in different_layers(model)]
        run_dummy_step(runner, dummy_step(decode=2))
    assert model.model.layers is layers
    assert state.caches is caches
    run_dummy_step(runner, dummy_step(decode=2))
