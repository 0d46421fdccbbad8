"""Prompt log-probabilities, embeddings, guided answers and copied pages on a GPU equal those on the CPU in fp32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from support.engines import assert_all_given_back, cpu_engine, manager_of, random_prompts
from support.tiny_models import make_model
from tok_core import Engine, EngineConfig, SamplingParams
from tok_core.sampling_params import Grammar
from tok_core.worker import prompt_outputs, state

pytestmark = pytest.mark.gpu

PROMPTS = random_prompts((1, 2, 16, 17, 65, 200))
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("gpu") / "llama", max_positions=2048)


@pytest.fixture
def engines(path: Path) -> Iterator[tuple[Engine, Engine]]:
    settings: dict[str, Any] = {"max_running": 64, "kv_cache_tokens": 65_536, "dtype": "float32", "device": "cuda"}
    with Engine(EngineConfig(model=str(path), **settings), in_process=True) as one, cpu_engine(path) as other:
        yield one, other
        assert_all_given_back(manager_of(one))


def test_prompt_logprobs_and_embeddings_on_gpu_equal_the_cpu(
    engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_outputs, "MAX_POOLED_ROWS", 7)  # rows are pooled in many portions
    here, there = engines
    scored = SamplingParams(max_tokens=0, prompt_logprobs=3)
    for one, other in zip(here.generate(PROMPTS, scored), there.generate(PROMPTS, scored), strict=True):
        ours, theirs = one.prompt_logprobs or [], other.prompt_logprobs or []
        assert [each and each.token_id for each in ours] == [each and each.token_id for each in theirs]
        for left, right in zip(ours[1:], theirs[1:], strict=True):
            assert left is not None
            assert right is not None
            np.testing.assert_allclose(left.logprob, right.logprob, atol=1e-3)
            np.testing.assert_allclose([p for _, p in left.top], [p for _, p in right.top], atol=1e-3)
    for pooling in ("last", "mean"):
        vectors = [
            np.stack([found.embedding for found in engine.embed(PROMPTS, pooling=pooling)]) for engine in engines
        ]
        np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-4)


def test_guided_answers_on_gpu_are_valid_and_mostly_equal_the_cpu(engines: tuple[Engine, Engine]) -> None:
    guided = SamplingParams(
        grammar=Grammar(kind="json_schema", value=json.dumps(SCHEMA)), n=4, seed=1, max_tokens=200, temperature=0.8
    )
    free = SamplingParams(n=4, seed=1, max_tokens=60, ignore_eos=True)
    asked = [guided if i % 2 else free for i in range(len(PROMPTS))]
    found = [engine.generate(PROMPTS, asked) for engine in engines]
    for output, params in zip(found[0], asked, strict=True):
        if params is guided:
            for sample in output.outputs:
                jsonschema.validate(json.loads(sample.text), SCHEMA)
    here, there = ([s.token_ids for output in outputs for s in output.outputs] for outputs in found)
    assert sum(left == right for left, right in zip(here, there, strict=True)) >= 0.9 * len(here)


def test_copying_the_last_prompt_page_in_portions_keeps_the_tokens(
    engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "MAX_COPY_BYTES", 4096)
    params = SamplingParams(temperature=0.9, seed=2, n=40, max_tokens=24, ignore_eos=True)
    here, there = ([s.token_ids for o in one.generate(PROMPTS, params) for s in o.outputs] for one in engines)
    assert sum(left == right for left, right in zip(here, there, strict=True)) >= 0.9 * len(here)
