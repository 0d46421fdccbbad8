"""With `batch_invariant`, a request's tokens and log-probabilities are the same bits in every schedule.

Each request is first computed alone, its prompt in one chunk. Schedules then differ in the order of arrival, chunks,
running samples, pages, groups, cached prefixes, memory (preemption), steps ahead, threads, replicas, ranks and stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.engines import cpu_engine, manager_of, random_prompts
from support.grouping import group_eagerly
from support.short_lengths import PROMPT, SHORT
from support.tiny_models import make_model
from tok_core import Engine, EngineConfig, InvalidField, RequestOutput, SamplingParams
from tok_core.model_config import read_config
from tok_core.models import build, fill_dummy_weights
from tok_core.quantization import QuantizationConfig, ScaledMethod
from tok_core.worker.startup.invariance_check import check_rows
from tok_core.worker.startup.resolve import require_batch_invariance
from tok_kernels import choose

pytestmark = pytest.mark.usefixtures("forked_children")

KINDS = ("llama3", "qwen3-window", "qwen2", "qwen2-moe")
STEM, *PARTS = random_prompts((70, 1, 15, 40, 130), seed=3)
PROMPTS = [STEM, STEM + PARTS[0], STEM + PARTS[1], STEM[:33] + PARTS[2], PARTS[3], PARTS[0], STEM + PARTS[1] + PARTS[2]]
NEW = 12
PARAMS = [
    SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=NEW, ignore_eos=True, logprobs=0),
    SamplingParams(n=3, temperature=1.2, seed=2, max_tokens=NEW, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=0.8, seed=3, top_k=30, top_p=0.9, max_tokens=NEW, ignore_eos=True, logprobs=0),
    SamplingParams(n=2, temperature=1.0, seed=4, presence_penalty=0.7, max_tokens=NEW, ignore_eos=True, logprobs=0),
    SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=2, prompt_logprobs=2),
    SamplingParams(n=4, temperature=1.0, seed=6, max_tokens=40, stop_token_ids=(9,), ignore_eos=True, logprobs=0),
    SamplingParams(temperature=1.0, seed=7, logit_bias={5: 3.0}, max_tokens=NEW, ignore_eos=True, logprobs=0),
]
Answer = list[object]


@dataclass(frozen=True)
class Schedule:
    """How the requests are computed: their order, and settings of the engine."""

    order: tuple[int, ...]
    calls: int
    eagerly: bool
    threads: int
    options: dict[str, Any]


schedules = st.builds(
    Schedule,
    order=st.permutations(range(len(PROMPTS))).map(tuple),
    calls=st.integers(1, 3),
    eagerly=st.booleans(),
    threads=st.sampled_from([1, 2]),
    options=st.fixed_dictionaries(
        {
            "max_step_tokens": st.sampled_from([16, 23, 64, 1024]),
            "max_running": st.sampled_from([1, 3, 16]),
            "page_size": st.sampled_from([4, 16]),
            "kv_cache_tokens": st.sampled_from([320, 4096]),
            "prefix_groups": st.booleans(),
            "run_ahead": st.sampled_from([1, 2, 4]),
        }
    ),
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module", params=KINDS)
def alone(request: pytest.FixtureRequest, directory: Path) -> tuple[Path, list[Answer]]:
    """Return a model and the answers to the requests, each computed by an engine that has computed nothing else."""
    path = make_model(request.param, directory / request.param, max_positions=256)
    found = []
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        with cpu_engine(path, batch_invariant=True, max_step_tokens=1024) as engine:
            found.append(answer(engine.generate([prompt], params)[0]))
    return path, found


def answer(output: RequestOutput) -> Answer:
    """Return the tokens and all log-probabilities of an output."""
    samples = [(sample.index, sample.token_ids, sample.logprobs) for sample in output.outputs]
    return [output.prompt_token_ids, samples, output.prompt_logprobs]


def answers(engine: Engine, order: tuple[int, ...], calls: int = 1) -> list[Answer]:
    """Return the answers to the requests, which arrive in this order, in one call or several."""
    found: dict[int, Answer] = {}
    for some in np.array_split(np.array(order), calls):
        outputs = engine.generate([PROMPTS[i] for i in some], [PARAMS[i] for i in some])
        found |= {int(i): answer(output) for i, output in zip(some, outputs, strict=True)}
    return [found[i] for i in range(len(PROMPTS))]


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schedule=schedules)
def test_every_schedule_gives_the_bits_of_each_request_alone(
    schedule: Schedule, alone: tuple[Path, list[Answer]]
) -> None:
    path, expected = alone
    before = torch.get_num_threads()
    torch.set_num_threads(schedule.threads)
    try:
        with cpu_engine(path, batch_invariant=True, max_model_len=256, **schedule.options) as engine:
            if schedule.eagerly:
                group_eagerly(manager_of(engine))
            assert answers(engine, schedule.order, schedule.calls) == expected
            again = answers(engine, schedule.order[::-1])  # prompts without prompt_logprobs are cached now
            assert again == expected
    finally:
        torch.set_num_threads(before)


def test_groups_preemptions_and_cached_prefixes_happen_and_change_no_bit(alone: tuple[Path, list[Answer]]) -> None:
    path, expected = alone
    order = tuple(range(len(PROMPTS)))
    with cpu_engine(path, batch_invariant=True, max_model_len=256, kv_cache_tokens=320, page_size=4) as engine:
        group_eagerly(manager_of(engine))
        engine.generate([PROMPT], SHORT)  # so that longer answers are not expected
        for _ in range(3):
            assert answers(engine, order) == expected
        stats = engine.stats()
        assert stats["group_rows"] > 0
        assert stats["preemptions"] > 0
        assert stats["cached_tokens"] > 0


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 4.0},
        {
            "rope_type": "longrope",
            "original_max_position_embeddings": 64,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0 + i / 2 for i in range(8)],
            "factor": 4.0,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rotations_that_depend_on_lengths_have_the_same_bits_in_every_step(
    rope: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tok_core.worker.startup.setup.DRAFTING_DEVICES", ("cuda", "cpu"))
    positions = 64 if rope["rope_type"] == "dynamic" else 256
    path = make_model("llama", tmp_path / "model", max_positions=positions, rope={"rope_theta": 1e4, **rope})
    prompts, params = [*PROMPTS, [5, 9], [9, 5]], [*PARAMS, *[msgspec.structs.replace(PARAMS[0], max_tokens=150)] * 2]
    with cpu_engine(path, batch_invariant=True) as engine:
        expected = [answer(engine.generate([one], of)[0]) for one, of in zip(prompts, params, strict=True)]
    with cpu_engine(path, batch_invariant=True, max_running=5, max_step_tokens=23, speculate=8, page_size=4) as engine:
        for _ in range(2):
            assert [answer(output) for output in engine.generate(prompts, params)] == expected


def test_without_the_mode_some_bits_depend_on_the_schedule(alone: tuple[Path, list[Answer]]) -> None:
    path, _ = alone
    found = []
    for options in ({"max_running": 1}, {"max_step_tokens": 64}):
        with cpu_engine(path, **options) as engine:
            found.append(answers(engine, tuple(range(len(PROMPTS)))))
    assert found[0] != found[1]


@pytest.mark.parametrize("layout", [{"dp": 2, "pp": 2}, {"tp": 2, "ep": True}])
def test_replicas_ranks_and_stages_do_not_depend_on_the_schedule(directory: Path, layout: dict[str, int]) -> None:
    kind = "qwen2-moe" if "ep" in layout else "qwen2"
    path = directory / f"parallel-{kind}"
    if not path.exists():
        make_model(kind, path, max_positions=256)
    config = EngineConfig(model=str(path), device="cpu", dtype="float32", batch_invariant=True, **layout)  # type: ignore[arg-type]
    order, found = tuple(range(len(PROMPTS))), []
    for options in ({"max_running": 2, "kv_cache_tokens": 4096}, {"max_step_tokens": 48, "kv_cache_tokens": 640}):
        with Engine(msgspec.structs.replace(config, **options)) as engine:
            found += [answers(engine, order), answers(engine, order[::-1])]
    assert found[1:] == found[:1] * 3


def test_linear_layers_whose_bits_depend_on_the_number_of_rows_are_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = directory / "checked"
    make_model("qwen2", path, max_positions=256)
    backend = choose(torch.device("cpu"), batch_invariant=True)
    model = build(read_config(path), backend, torch.device("cpu"), torch.bfloat16)
    fill_dummy_weights(model, seed=0)
    check_rows(model, 70)
    right = backend.linear

    def linear(x_TK: Tensor, *words: Tensor, residual_TN: Tensor | None = None) -> Tensor:
        out_TN = right(x_TK, *words, residual_TN=residual_TN)
        return out_TN * 1.01 if len(x_TK) in (3, 17) else out_TN

    monkeypatch.setattr(backend, "linear", linear, raising=False)
    with pytest.raises(
        InvalidField, match=r"batch_invariant.*embed_tokens, \[512, 64\] .*\[3, 17\] rows than among 70"
    ):
        check_rows(model, 70)


def test_experts_whose_bits_depend_on_the_number_of_rows_are_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = directory / "experts"
    make_model("qwen2-moe", path, max_positions=256)
    backend = choose(torch.device("cpu"), batch_invariant=True)
    model = build(read_config(path), backend, torch.device("cpu"), torch.bfloat16)
    fill_dummy_weights(model, seed=0)
    check_rows(model, 70)
    right = backend.fused_experts

    def fused_experts(x_TN: Tensor, *words: Any, residual_TN: Tensor | None = None) -> Tensor:
        out_TN = right(x_TN, *words, residual_TN=residual_TN)
        return out_TN * 1.01 if len(x_TN) in (5, 64) else out_TN

    monkeypatch.setattr(backend, "fused_experts", fused_experts, raising=False)
    with pytest.raises(InvalidField, match=r"batch_invariant.*layers\.1\.mlp gives .*\[5, 64\] rows than among 70"):
        check_rows(model, 70)


def test_settings_that_are_not_invariant_are_refused_by_name() -> None:
    with pytest.raises(InvalidField, match=r"backend is 'flashinfer'.*batch_invariant"):
        EngineConfig(model="m", batch_invariant=True, backend="flashinfer")
    with pytest.raises(InvalidField, match=r"async_tp_threshold is 64.*batch_invariant"):
        EngineConfig(model="m", batch_invariant=True, tp=2, async_tp_threshold=64)
    with pytest.raises(InvalidField, match="batch_invariant is 'yes'"):
        EngineConfig(model="m", batch_invariant="yes")  # type: ignore[arg-type]


def test_settings_not_invariant_on_a_gpu_are_refused_by_name() -> None:
    cuda, dense = torch.device("cuda"), QuantizationConfig()
    config = EngineConfig(model="m", batch_invariant=True)
    require_batch_invariance(config, dense, cuda)
    with pytest.raises(InvalidField, match=r"batch_invariant is True.*quantised"):
        require_batch_invariance(config, QuantizationConfig(ScaledMethod(torch.int8)), cuda)
    for dtype, quantization in (("int8", dense), ("fp8", dense), ("auto", QuantizationConfig(kv_scales="head"))):
        narrow = msgspec.structs.replace(config, kv_cache_dtype=dtype)
        message = f"kv_cache_dtype is '{dtype}'; allowed: unquantized on cuda with batch_invariant"
        with pytest.raises(InvalidField, match=message):
            require_batch_invariance(narrow, quantization, cuda)
    with pytest.raises(InvalidField, match=r"tp is 2; allowed: 1 on cuda with batch_invariant"):
        require_batch_invariance(msgspec.structs.replace(config, tp=2), dense, cuda)
