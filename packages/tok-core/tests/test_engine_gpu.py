"""The engine on a GPU: fp32 tokens equal transformers', and no step compiles, allocates or waits for the device."""

from __future__ import annotations

import base64
import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from support.drafting import draft_often, record_drafts
from support.engines import assert_all_given_back, cpu_engine, manager_of, random_prompts
from support.grouping import group_eagerly
from support.setup_audit import set_up_late
from support.tiny_eagle3 import ReferenceHead, make_head, make_target
from support.tiny_models import KINDS, change_weights, make_model, reference_greedy
from support.trainer import read_line, sharer
from tok_core import Engine, EngineConfig, EngineError, ModelError, SamplingParams
from tok_core.manager.speculation import HostSpeculator
from tok_core.messages import IpcHandle
from tok_core.worker import cuda_graphs
from tok_core.worker.sampling import MAX_SAMPLED_ROWS

pytestmark = pytest.mark.gpu

ASKED = random_prompts((1, 3, 15, 16, 17, 33, 64, 65, 128, 200))
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu")


@pytest.fixture(params=KINDS)
def path(request: pytest.FixtureRequest, directory: Path) -> Path:
    return made(request.param, directory)


def made(kind: str, directory: Path) -> Path:
    target = directory / kind
    return target if target.exists() else make_model(kind, target)


def engine(path: Path, **options: object) -> Engine:
    settings = {"device": "cuda", "max_running": 64, "kv_cache_tokens": 65_536, **options}
    return Engine(EngineConfig(model=str(path), **settings), in_process=True)  # type: ignore[arg-type]


def test_greedy_tokens_in_fp32_equal_transformers(path: Path) -> None:
    wanted = reference_greedy(path, ASKED, 64)
    for options in ({}, {"page_size": 4, "max_step_tokens": 64}, {"kv_cache_tokens": 512, "max_model_len": 512}):
        with engine(path, dtype="float32", **options) as one:
            for _ in range(2):  # the second time from the prefix cache
                outputs = one.generate(ASKED, GREEDY)
                for output, (tokens, logprobs) in zip(outputs, wanted, strict=True):
                    assert output.outputs[0].token_ids == list(tokens)
                    got = [token.logprob for token in output.outputs[0].logprobs or []]
                    np.testing.assert_allclose(got, logprobs, atol=1e-3)
            assert_all_given_back(manager_of(one))


@pytest.mark.parametrize("options", [{}, {"cuda_graphs": False}, {"page_size": 4, "kv_cache_tokens": 1024}])
def test_drafts_of_the_device_change_no_greedy_token(directory: Path, options: dict[str, object]) -> None:
    path = made("llama3", directory)
    with engine(path, dtype="float32", speculate=4, **options) as one:
        for _ in range(3):
            outputs = one.generate(ASKED, GREEDY)
            for output, (tokens, _) in zip(outputs, reference_greedy(path, ASKED, 64), strict=True):
                assert output.outputs[0].token_ids == list(tokens)
        found = one.stats()
        assert_all_given_back(manager_of(one))
    assert found["accepted_tokens"] > 64 * len(ASKED)


@pytest.mark.parametrize("options", [{}, {"cuda_graphs": False}, {"max_step_tokens": 64}, {"backend": "triton"}])
def test_draft_model_changes_no_greedy_token(directory: Path, options: dict[str, object]) -> None:
    """The model drafts for itself, so that all tokens but those near a tie are accepted."""
    path = made("llama3", directory)
    with engine(path, dtype="float32", speculate=4, draft=str(path), **options) as one:
        manager = manager_of(one)
        assert isinstance(manager.speculator, HostSpeculator)
        manager.speculator.costs._pass_share = 1e-6  # as if the draft model were small
        draft_model = manager.ports._runner.draft_model  # type: ignore[attr-defined]
        assert (len(draft_model.graphs) > 0) == options.get("cuda_graphs", True)
        outputs = one.generate(ASKED, GREEDY)
        found = one.stats()
        assert_all_given_back(manager)
    for output, (tokens, _) in zip(outputs, reference_greedy(path, ASKED, 64), strict=True):
        assert output.outputs[0].token_ids == list(tokens)
    assert found["model_accepted_tokens"] > 0.9 * found["model_drafted_tokens"] > 300


@pytest.mark.parametrize("options", [{}, {"cuda_graphs": False}, {"max_step_tokens": 64}, {"backend": "triton"}])
def test_eagle3_head_drafts_what_the_plain_head_drafts(directory: Path, options: dict[str, object]) -> None:
    """Tokens near a tie may differ. A few drafted tokens are accepted, and read again with other hidden states."""
    path, head, prompts = directory / "eagle3-target", directory / "eagle3", ASKED[:-1]
    if not path.exists():
        make_head(head, make_target(path), noise=0.05)
    with engine(path, dtype="float32", speculate=4, draft=str(head), **options) as one:
        draft_often(one)
        drafts = record_drafts(one)
        draft_model = manager_of(one).ports._runner.draft_model  # type: ignore[attr-defined]
        assert (len(draft_model.graphs) > 0) == options.get("cuda_graphs", True)
        outputs = one.generate(prompts, GREEDY)
        found = one.stats()
        assert_all_given_back(manager_of(one))
    for output, (tokens, _) in zip(outputs, reference_greedy(path, prompts, 64), strict=True):
        assert output.outputs[0].token_ids == list(tokens)
    plain = ReferenceHead(head, path)
    equal = [
        plain.draft(one.tokens, len(one.drafted), lambda logits, _: int(logits.argmax())) == one.drafted
        for one in drafts
    ]
    assert sum(equal) > 0.97 * len(equal) > 100
    assert found["model_accepted_tokens"] > 10


@pytest.mark.parametrize("enlarged", [False, True])
def test_updated_weights_are_those_that_captured_graphs_read(enlarged: bool, directory: Path, tmp_path: Path) -> None:
    def enlarge(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.1.self_attn.q_proj.weight"] *= 1e5  # beyond float16: the graphs are captured again

    old, new = made("llama", directory), make_model("llama", tmp_path / "new", seed=1)
    if enlarged:
        change_weights(new, enlarge)
    with engine(new, dtype="bfloat16") as one:
        wanted = [output.outputs[0].token_ids for output in one.generate(ASKED, GREEDY)]
    with engine(old, dtype="bfloat16") as one:
        assert [output.outputs[0].token_ids for output in one.generate(ASKED, GREEDY)] != wanted
        one.update_weights(str(new))
        outputs = one.generate(ASKED, GREEDY)
        assert [output.outputs[0].token_ids for output in outputs] == wanted
        assert_all_given_back(manager_of(one))


@pytest.mark.parametrize("staged", [False, True])
def test_tensors_of_another_process_on_the_gpu_are_read_in_place(tmp_path: Path, staged: bool) -> None:
    old, new = (make_model("qwen2", tmp_path / str(seed), seed=seed) for seed in (0, 1))
    with engine(new, dtype="bfloat16") as one:
        wanted = [output.outputs[0].token_ids for output in one.generate(ASKED, GREEDY)]
    with engine(old, dtype="bfloat16") as one, sharer(new) as trainer:
        assert [output.outputs[0].token_ids for output in one.generate(ASKED, GREEDY)] != wanted
        info = json.loads(read_line(trainer))
        handles = [
            {uuid: IpcHandle(base64.b64decode(found["handle"]), found["offset"]) for uuid, found in each.items()}
            for each in info["ipc_handles"]
        ]
        described = info["names"], info["dtype_names"], info["shapes"]
        outside = [{uuid: IpcHandle(found.handle, 1 << 50) for uuid, found in each.items()} for each in handles]
        with pytest.raises(ModelError, match="outside of an allocation"):
            one.weight_transfer.receive(*described, handles=outside)
        unknown = [{uuid: IpcHandle(b"x" * 64, 0) for uuid in each} for each in handles]
        with pytest.raises(ModelError, match="cuIpcOpenMemHandle"):
            one.weight_transfer.receive(*described, handles=unknown)
        if staged:
            one.weight_transfer.start()
        one.weight_transfer.receive(*described, handles=handles)
        if staged:
            trainer.kill()
            trainer.wait()
            one.weight_transfer.finish()
        assert [output.outputs[0].token_ids for output in one.generate(ASKED, GREEDY)] == wanted
        assert_all_given_back(manager_of(one))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sleep_releases_memory_and_keeps_addresses_graphs_and_tokens(
    directory: Path, tmp_path: Path, dtype: str
) -> None:
    def enlarge(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.1.self_attn.q_proj.weight"] *= 1e5  # beyond float16: the graphs are captured again

    path, new = made("llama", directory), change_weights(make_model("llama", tmp_path / "new", seed=1), enlarge)
    with engine(new, dtype=dtype) as one:
        updated = [output.outputs[0].token_ids for output in one.generate(ASKED, GREEDY)]
    with engine(path, dtype=dtype, enable_sleep_mode=True, kv_cache_tokens=1 << 20) as one:
        runner = manager_of(one).ports._runner  # type: ignore[attr-defined]
        cache_bytes, graphs = runner.state.kv.nbytes, len(runner.graphs)
        assert graphs
        addresses = [tensor.data_ptr() for tensor in (*runner.model.parameters(), runner.state.kv)]
        wanted = [output.outputs[0].token_ids for output in one.generate(ASKED, GREEDY)]
        for level in (1, 2, 1):
            before = torch.cuda.mem_get_info()[0]
            one.sleep(level)
            assert torch.cuda.mem_get_info()[0] - before > 0.9 * cache_bytes
            one.wake_up()
            assert torch.cuda.mem_get_info()[0] - before < 0.1 * cache_bytes
            assert addresses == [tensor.data_ptr() for tensor in (*runner.model.parameters(), runner.state.kv)]
            assert [output.outputs[0].token_ids for output in one.generate(ASKED, GREEDY)] == wanted
        one.sleep(2)
        one.wake_up(["weights"])
        one.update_weights(str(new))  # captures graphs once the KV cache is awake
        one.wake_up(["kv_cache"])
        assert len(runner.graphs) >= graphs
        assert [output.outputs[0].token_ids for output in one.generate(ASKED, GREEDY)] == updated
        assert_all_given_back(manager_of(one))


def test_engine_without_free_memory_sleeps_on(directory: Path) -> None:
    with engine(made("llama", directory), enable_sleep_mode=True, kv_cache_tokens=1 << 20) as one:
        wanted = [output.outputs[0].token_ids for output in one.generate(ASKED, GREEDY)]
        one.sleep()
        free = torch.cuda.mem_get_info()[0]
        taken = torch.empty(free - (64 << 20), dtype=torch.uint8, device="cuda")
        with pytest.raises(EngineError, match=r"refuses .* MiB: cuMemCreate failed with CUDA_ERROR_OUT_OF_MEMORY"):
            one.wake_up()
        assert one.is_sleeping
        del taken
        torch.cuda.empty_cache()
        one.wake_up()
        assert [output.outputs[0].token_ids for output in one.generate(ASKED, GREEDY)] == wanted


@pytest.mark.parametrize("kind", ["qwen2-window", "qwen3-window", "dynamic", "longrope", "yarn"])
def test_sliding_windows_and_rope_scalings_in_fp32_equal_transformers(kind: str, tmp_path: Path) -> None:
    rope = {"rope_theta": 1000.0, "rope_type": kind, "factor": 8.0, "original_max_position_embeddings": 64}
    if kind == "longrope":
        rope |= {"short_factor": [1.0 + c / 16 for c in range(8)], "long_factor": [2.0 + c / 4 for c in range(8)]}
    if kind == "dynamic":
        del rope["original_max_position_embeddings"]
    model = make_model(
        kind if kind.endswith("window") else "llama",
        tmp_path,
        rope=None if kind.endswith("window") else rope,
        max_positions=64 if kind in ("dynamic", "yarn") else 512,
    )
    wanted = reference_greedy(model, ASKED, 64)
    for options in ({}, {"page_size": 4, "max_step_tokens": 64}):
        with engine(model, dtype="float32", **options) as one:
            for _ in range(2):
                for output, (tokens, logprobs) in zip(one.generate(ASKED, GREEDY), wanted, strict=True):
                    assert output.outputs[0].token_ids == list(tokens)
                    got = [token.logprob for token in output.outputs[0].logprobs or []]
                    np.testing.assert_allclose(got, logprobs, atol=1e-3)


def test_prefix_groups_change_no_token_in_fp32(path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, n=8)
    answers = []
    for groups in (True, False):
        with engine(path, dtype="float32", prefix_groups=groups) as one:
            group_eagerly(manager_of(one))
            answers.append([[s.token_ids for s in output.outputs] for output in one.generate(ASKED, params)])
            assert (one.stats()["group_rows"] > 0) == groups
    assert answers[0] == answers[1]


@pytest.mark.parametrize("sampled_rows", [MAX_SAMPLED_ROWS, 5])
def test_cuda_graphs_change_no_token_in_fp32(path: Path, sampled_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MAX_SAMPLED_ROWS", sampled_rows)
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=20 + 3 * i, n=1 + i % 5, top_p=1 - 0.1 * (i == 4))
        for i in range(len(ASKED))
    ]
    answers = []
    for graphs in (True, False):
        with engine(path, dtype="float32", cuda_graphs=graphs, max_running=24) as one:
            captured = len(manager_of(one).ports._runner.graphs)  # type: ignore[attr-defined]
            assert (captured > 0) == graphs
            answers.append([[s.token_ids for s in output.outputs] for output in one.generate(ASKED, params)])
            assert_all_given_back(manager_of(one))
    assert answers[0] == answers[1]


def test_engine_does_not_compile_capture_allocate_or_sync_after_ready(path: Path) -> None:
    assert set_up_late(path) == ([], 0, 0, set())


def test_late_captures_of_graphs_compile_nothing_and_do_not_sync(path: Path) -> None:
    late = set_up_late(path, late_graphs=True)
    assert late.graphs > 0
    assert (late.kernels, late.waits) == ([], set())


@pytest.mark.skipif(find_spec("flashinfer") is None, reason="needs Linux on x86-64, which FlashInfer runs on")
def test_flashinfer_does_not_compile_capture_allocate_or_sync_late(directory: Path) -> None:
    path = make_model("llama", directory / "wide", head_dim=64)
    assert set_up_late(path, "flashinfer") == ([], 0, 0, set())


def test_seeded_samples_on_gpu_equal_those_on_cpu(path: Path) -> None:
    params = SamplingParams(temperature=0.9, max_tokens=48, seed=3, ignore_eos=True, top_p=0.95, presence_penalty=0.4)
    with engine(path, dtype="float32") as one:
        here = [output.outputs[0].token_ids for output in one.generate(ASKED, params)]
    with cpu_engine(path) as other:
        there = [output.outputs[0].token_ids for output in other.generate(ASKED, params)]
    same = sum(left == right for left, right in zip(here, there, strict=True))
    assert same >= len(ASKED) - 1  # rounding may change one sampled token near a threshold


@pytest.mark.parametrize("cache", ["fp8", "int8"])
def test_narrow_kv_cache_on_gpu_gives_mostly_the_tokens_of_the_cpu(cache: str, path: Path) -> None:
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=24, n=6, ignore_eos=True)
    with engine(path, dtype="float32", kv_cache_dtype=cache) as one:
        here = [s.token_ids for output in one.generate(ASKED, params) for s in output.outputs]
        assert_all_given_back(manager_of(one))
    with cpu_engine(path, kv_cache_dtype=cache) as other:
        there = [s.token_ids for output in other.generate(ASKED, params) for s in output.outputs]
    same = sum(left == right for left, right in zip(here, there, strict=True))
    assert same >= 0.9 * len(here)


@pytest.mark.parametrize("running", [1, 3])
def test_max_step_tokens_may_exceed_the_total_context_of_all_slots(directory: Path, running: int) -> None:
    path = made("llama", directory)
    wanted = reference_greedy(path, ASKED, 64)
    # The cache size is fixed, because tests that run at the same time change the free memory.
    with engine(path, dtype="float32", max_running=running) as one:
        assert running * one.info.max_model_len < one.info.max_step_tokens
        outputs = one.generate(ASKED, GREEDY)
    for output, (tokens, _) in zip(outputs, wanted, strict=True):
        assert output.outputs[0].token_ids == list(tokens)


def test_kv_cache_uses_the_configured_gpu_memory_fraction(path: Path) -> None:
    with engine(path, kv_cache_tokens=None, gpu_memory_fraction=0.2, max_model_len=512) as one:
        total = torch.cuda.get_device_properties(0).total_memory
        assert 0.1 * total < torch.cuda.memory_allocated() < 0.2 * total
        assert len(one.generate(ASKED, GREEDY)) == len(ASKED)


def test_too_small_gpu_memory_fraction_is_refused_with_the_memory_use(directory: Path) -> None:
    path = made("llama", directory)
    wanted = r"steps take \d+\.\d GiB, and weights, CUDA and other processes leave 0\.\d GiB"
    free, total = torch.cuda.mem_get_info()
    in_use = total - free - torch.cuda.memory_reserved() + torch.cuda.memory_allocated()
    fraction = (in_use + (64 << 20)) / total  # leaves enough for the weights, and too little for a step
    with pytest.raises(EngineError, match=wanted), engine(path, kv_cache_tokens=None, gpu_memory_fraction=fraction):
        pass


def test_worker_process_on_gpu_gives_the_tokens_of_transformers(path: Path) -> None:
    config = EngineConfig(model=str(path), dtype="float32", kv_cache_tokens=65_536, max_running=64)
    with Engine(config) as one:
        assert one.info.device == "cuda:0"
        outputs = one.generate(ASKED, GREEDY)
    for output, (tokens, _) in zip(outputs, reference_greedy(path, ASKED, 64), strict=True):
        assert output.outputs[0].token_ids == list(tokens)
