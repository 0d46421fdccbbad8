"""Tests of the demo model over a KV cache of 8 bits: accuracy, log-probabilities and determinism."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest

from support.engines import cpu_engine
from tok_core import Completion, Engine, SamplingParams
from tok_core.text.template import ChatTemplate
from tok_core.text.tokenizer import Tokenizer
from tok_server.demo import HELD_OUT_FILE, MODEL_DIR
from tok_server.passatk.answers import FinalAnswerPattern

PROBLEMS = 20
GREEDY = SamplingParams(temperature=0, max_tokens=200, logprobs=0)


@pytest.fixture(scope="module")
def problems() -> list[tuple[list[int], str]]:
    """Held-out questions as chat prompts, and the number that each asks for."""
    template, tokenizer = ChatTemplate.load(MODEL_DIR), Tokenizer.load(MODEL_DIR)
    assert template is not None
    rows = [json.loads(line) for line in HELD_OUT_FILE.read_text().splitlines()[:PROBLEMS]]
    texts = [template.render([{"role": "user", "content": row["question"]}]) for row in rows]
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return [(prompt, row["answer"].split("#### ")[1]) for prompt, row in zip(prompts, rows, strict=True)]


@pytest.fixture(scope="module", params=["fp8_e4m3", "int8"])
def dtype(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def narrow_engine(dtype: str) -> Iterator[Engine]:
    with cpu_engine(MODEL_DIR, kv_cache_dtype=dtype) as engine:
        yield engine


@pytest.fixture(scope="module")
def exact(problems: list[tuple[list[int], str]]) -> list[Completion]:
    with cpu_engine(MODEL_DIR) as engine:
        return greedy(engine, problems)


def greedy(engine: Engine, problems: list[tuple[list[int], str]]) -> list[Completion]:
    return [output.outputs[0] for output in engine.generate([prompt for prompt, _ in problems], GREEDY)]


def test_a_narrow_cache_keeps_accuracy_and_nearly_the_logprobs(
    narrow_engine: Engine, exact: list[Completion], problems: list[tuple[list[int], str]]
) -> None:
    narrow, pattern = greedy(narrow_engine, problems), FinalAnswerPattern()
    right = [
        sum(pattern.is_correct(sample.text, answer) for sample, (_, answer) in zip(samples, problems, strict=True))
        for samples in (exact, narrow)
    ]
    assert right[0] >= PROBLEMS // 2
    assert abs(right[1] - right[0]) <= 2
    gaps = [gap for pair in zip(exact, narrow, strict=True) for gap in logprob_gaps(*pair)]
    assert 0 < np.mean(gaps) < 0.005  # above 0, since the cache is rounded


def logprob_gaps(exact: Completion, narrow: Completion) -> list[float]:
    """Return the differences of log-probabilities over the common prefix of both samples."""
    assert exact.logprobs is not None
    assert narrow.logprobs is not None
    gaps = []
    for one, other in zip(exact.logprobs, narrow.logprobs, strict=False):
        if one.token_id != other.token_id:
            break
        gaps.append(abs(one.logprob - other.logprob))
    return gaps


def test_a_narrow_cache_gives_the_same_tokens_chunked_cached_and_forked(
    narrow_engine: Engine, dtype: str, problems: list[tuple[list[int], str]]
) -> None:
    wanted = [sample.token_ids for sample in greedy(narrow_engine, problems[:8])]
    again = [sample.token_ids for sample in greedy(narrow_engine, problems[:8])]  # from cached pages
    prompts = [prompt for prompt, _ in problems[:8]]
    with cpu_engine(MODEL_DIR, kv_cache_dtype=dtype, page_size=4, max_step_tokens=7, max_running=7) as engine:
        outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=200, n=2))
    assert again == wanted
    assert [sample.token_ids for output in outputs for sample in output.outputs] == [w for w in wanted for _ in (0, 1)]
