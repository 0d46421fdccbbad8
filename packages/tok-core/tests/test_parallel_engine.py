"""Engines with any number of ranks, stages and replicas give the answers of a single worker."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.engines import random_prompts
from support.tiny_models import make_model, reference_greedy
from tok_core import Engine, EngineConfig, InvalidField, SamplingParams

pytestmark = pytest.mark.usefixtures("forked_children")

LENGTHS = (1, 3, 15, 16, 17, 33, 64, 65, 128, 200)
PROMPTS = random_prompts(LENGTHS)
NEW = 20
# Few on a CPU, where each process imports torch; each replica of {"dp": 2, "tp": 2} covers {"tp": 2}.
ON_CPUS = ({"tp": 2, "pp": 2}, {"dp": 2, "tp": 2})
COMBINATIONS = ({"dp": 2}, {"tp": 2}, {"pp": 2}, *ON_CPUS)
ON_FOUR = ({"dp": 4}, {"tp": 4}, {"pp": 4}, {"pp": 3}, {"dp": 2, "pp": 2})
ON_GPUS = tuple({**shared, "cuda_graphs": graphs} for shared in (*COMBINATIONS, *ON_FOUR) for graphs in (True, False))

GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=0)
DRAWN = (
    SamplingParams(n=5, temperature=0.9, seed=11, max_tokens=NEW),
    SamplingParams(n=3, temperature=1.3, seed=5, top_k=20, top_p=0.9, max_tokens=NEW, logprobs=3),
    SamplingParams(temperature=0.7, seed=2, presence_penalty=0.5, repetition_penalty=1.2, min_p=0.02, max_tokens=NEW),
    SamplingParams(temperature=0, logit_bias={7: 5.0, 9: -100.0}, min_tokens=4, max_tokens=NEW),
    SamplingParams(n=3, seed=4, allowed_token_ids=tuple(range(40, 60)), bad_words=("JK", "Q"), max_tokens=NEW),
)
SCORED = SamplingParams(max_tokens=0, prompt_logprobs=3)
SAMPLES = SamplingParams(n=8, temperature=0, max_tokens=NEW, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with two key/value heads, four layers, biases, and a tied LM head."""
    return make_model("qwen2", tmp_path_factory.mktemp("parallel") / "qwen2", layers=4)


Answers = list[list[list[int]]]
Found = tuple[Answers, Answers, Answers, list[list[float]], list[float]]


def answers(path: Path, **options: Any) -> Found:
    """Generate greedily twice, the second time from the cache and as samples that share a prompt; then sample.

    Return the tokens, the log-probabilities of the first greedy outputs, and values of the prompts themselves.
    """
    settings = {"kv_cache_tokens": 4096, "max_running": 48, "max_step_tokens": 96, "dtype": "float32", **options}
    with Engine(EngineConfig(model=str(path), **settings)) as engine:
        first = engine.generate(PROMPTS, GREEDY)
        again = engine.generate(PROMPTS[4:8], SAMPLES)
        drawn = engine.generate(PROMPTS[3:8], list(DRAWN))
        scored = engine.generate(PROMPTS, SCORED)
        embedded = engine.embed(PROMPTS) + engine.embed(PROMPTS, pooling="mean")
    logprobs = [[token.logprob for token in output.outputs[0].logprobs or []] for output in first]
    greedy, shared, sampled = (
        [[sample.token_ids for sample in output.outputs] for output in outputs] for outputs in (first, again, drawn)
    )
    prompts = [value for output in scored for one in output.prompt_logprobs or [] if one for _, value in one.top]
    prompts += [value for one in embedded for value in one.embedding.tolist()]
    return greedy, shared, sampled, logprobs, prompts


@pytest.fixture(scope="module")
def alone(path: Path) -> Found:
    return answers(path, device="cpu")


@pytest.mark.parametrize("options", ON_CPUS, ids=str)
def test_tp_pp_and_dp_on_cpus_give_the_tokens_of_one_worker(path: Path, alone: Found, options: dict[str, int]) -> None:
    found = answers(path, device="cpu", **options)
    assert found[:3] == alone[:3]
    np.testing.assert_allclose(found[3], alone[3], atol=1e-3)
    np.testing.assert_allclose(found[4], alone[4], atol=1e-3)


def test_one_worker_gives_the_tokens_of_transformers(path: Path, alone: Found) -> None:
    wanted = [tokens for tokens, _ in reference_greedy(path, PROMPTS, NEW)]
    assert [samples[0] for samples in alone[0]] == wanted
    assert alone[1] == [[tokens] * 8 for tokens in wanted[4:8]]


@pytest.mark.gpu
@pytest.mark.parametrize("options", ON_GPUS, ids=str)
def test_tp_pp_and_dp_on_gpus_give_the_tokens_of_one_cpu(path: Path, alone: Found, options: dict[str, Any]) -> None:
    workers = math.prod(options.get(name, 1) for name in ("dp", "tp", "pp"))
    if torch.cuda.device_count() < workers:
        pytest.skip(f"needs {workers} CUDA devices")
    found = answers(path, device="cuda", **options)
    assert found[:2] == alone[:2]
    np.testing.assert_allclose(found[3], alone[3], atol=1e-3)
    np.testing.assert_allclose(found[4], alone[4], atol=1e-3)


@pytest.mark.parametrize(
    ("options", "field", "reason"),
    [
        ({"tp": 3}, "tp", "query heads"),
        ({"pp": 9}, "pp", "layers"),
    ],
)
def test_tp_or_pp_that_cannot_split_the_model_is_rejected_at_once(
    path: Path, options: dict[str, int], field: str, reason: str
) -> None:
    with pytest.raises(InvalidField, match=reason) as error:
        Engine(EngineConfig(model=str(path), device="cpu", **options), in_process=True)  # type: ignore[arg-type]
    assert error.value.field == field


def test_tensor_parallel_ranks_need_separate_processes(path: Path) -> None:
    with pytest.raises(InvalidField, match="1 within one process"):
        Engine(EngineConfig(model=str(path), device="cpu", tp=2), in_process=True)
