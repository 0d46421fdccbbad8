"""Penalties count a sample's own tokens, whatever its pages held before and however the sample starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.engines import cpu_engine, random_prompts
from support.tiny_models import make_model
from tok_core import Engine, SamplingParams

NEW = 6
RUNNING = 5  # samples beyond this number start late, from the retained prompt
PAGE_SIZES = (1, 2, 4, 16)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("penalties") / "llama")


@pytest.fixture(scope="module")
def single(path: Path) -> Iterator[Engine]:
    """An engine that computes one sample at a time, each in pages that were not used before."""
    with cpu_engine(path, max_running=1, kv_cache_tokens=1 << 17, page_size=16) as engine:
        yield engine


@pytest.fixture(scope="module", params=PAGE_SIZES)
def shared(request: pytest.FixtureRequest, path: Path) -> Iterator[Engine]:
    """An engine of few pages, which every example reuses; sequences may be preempted."""
    with cpu_engine(path, max_running=RUNNING, max_model_len=64, kv_cache_tokens=160, page_size=request.param) as one:
        yield one


def penalised(n: int, repetition: float, presence: float, frequency: float) -> SamplingParams:
    return SamplingParams(
        n=n,
        temperature=0,
        max_tokens=NEW,
        ignore_eos=True,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logprobs=0,
    )


requests = st.tuples(
    *(st.integers(1, 40), st.integers(0, 3), st.integers(1, 3 * RUNNING)),  # prompt length, its seed, samples
    *(st.sampled_from([1.0, 1.3, 4.0]), st.sampled_from([0.0, 1.5]), st.sampled_from([0.0, 0.5])),
)


@settings(max_examples=10, deadline=None)
@given(asked=st.lists(requests, min_size=1, max_size=4))
def test_penalised_greedy_samples_equal_a_single_sample(
    single: Engine, shared: Engine, asked: list[tuple[int, int, int, float, float, float]]
) -> None:
    prompts = [random_prompts((length,), seed)[0] for length, seed, *_ in asked]
    alone = single.generate(prompts, [penalised(1, *penalties) for _, _, _, *penalties in asked])
    together = shared.generate(prompts, [penalised(n, *penalties) for _, _, n, *penalties in asked])
    for wanted, found, (_, _, n, *_) in zip(alone, together, asked, strict=True):
        assert [sample.token_ids for sample in found.outputs] == [wanted.outputs[0].token_ids] * n


def test_forks_penalise_tokens_of_the_partial_last_prompt_page(path: Path) -> None:
    """Each prompt holds over half of the vocabulary in one partial page, so most first tokens are penalised."""
    prompts = [np.random.default_rng(seed).permutation(300).tolist() for seed in range(8)]
    others = random_prompts((100,) * 8, seed=9)
    with cpu_engine(path, page_size=512) as engine:
        engine.generate(others, SamplingParams(n=4, max_tokens=64, seed=1))
        one, four = (engine.generate(prompts, penalised(n, 4.0, 0.0, 0.0)) for n in (1, 4))
    for wanted, found in zip(one, four, strict=True):
        assert [sample.token_ids for sample in found.outputs] == [wanted.outputs[0].token_ids] * 4
