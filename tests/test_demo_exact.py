"""Tests that the engine gives the demo model's greedy tokens of transformers, however they are scheduled.

The cases extend each prompt by first tokens of its answer, so that one transformers run serves several prompts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest

from support.engines import cpu_engine, manager_of
from support.grouping import group_eagerly
from support.short_lengths import PROMPT, SHORT, unsampled
from support.tiny_models import reference_greedy
from tok_core import Engine, RequestOutput, SamplingParams
from tok_core.text.template import ChatTemplate
from tok_core.text.tokenizer import Tokenizer
from tok_server.demo import HELD_OUT_FILE, MODEL_DIR

NEW = 64
GROWN = range(8)


@dataclass(frozen=True)
class Case:
    """A prompt and its greedy continuation by transformers."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


@pytest.fixture(scope="module")
def grown() -> list[Case]:
    """64 prompts: eight held-out questions as chat, each followed by 0 to 7 tokens of its answer."""
    template, tokenizer = ChatTemplate.load(MODEL_DIR), Tokenizer.load(MODEL_DIR)
    assert template is not None
    questions = [json.loads(line)["question"] for line in HELD_OUT_FILE.read_text().splitlines()[:8]]
    texts = [template.render([{"role": "user", "content": question}]) for question in questions]
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    answers = reference_greedy(MODEL_DIR, prompts, NEW + max(GROWN))
    return [
        Case(prompt + tokens[:more], tokens[more : more + NEW], logprobs[more : more + NEW])
        for more in GROWN
        for prompt, (tokens, logprobs) in zip(prompts, answers, strict=True)
    ]


@pytest.fixture(scope="module")
def wanted(grown: list[Case]) -> list[Case]:
    """The cases of the eight questions alone."""
    return grown[:8]


def generate(
    engine: Engine, wanted: list[Case], n: int = 1, stop_token_ids: tuple[int, ...] = ()
) -> list[RequestOutput]:
    params = SamplingParams(
        temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=0, n=n, stop_token_ids=stop_token_ids
    )
    return engine.generate([case.prompt for case in wanted], params)


def assert_equal(outputs: list[RequestOutput], wanted: list[Case], n: int = 1) -> None:
    for output, case in zip(outputs, wanted, strict=True):
        assert [sample.index for sample in output.outputs] == list(range(n))
        for sample in output.outputs:
            assert sample.token_ids == case.tokens
            assert sample.logprobs is not None
            np.testing.assert_allclose([one.logprob for one in sample.logprobs], case.logprobs, atol=1e-3)


@pytest.mark.parametrize("options", [{}, {"page_size": 4, "max_step_tokens": 7, "max_running": 7}])
def test_greedy_tokens_equal_transformers_with_and_without_chunked_prefill(
    wanted: list[Case], options: dict[str, int]
) -> None:
    with cpu_engine(MODEL_DIR, **options) as engine:
        assert_equal(generate(engine, wanted), wanted)


@pytest.mark.parametrize("page_size", [4, 16])
def test_cached_prefixes_change_no_token(wanted: list[Case], page_size: int) -> None:
    with cpu_engine(MODEL_DIR, page_size=page_size) as engine:
        generate(engine, wanted)
        again = generate(engine, wanted)
    assert_equal(again, wanted)
    whole_pages = [(len(case.prompt) - 1) // page_size * page_size for case in wanted]
    assert [output.cached_tokens for output in again] == whole_pages


def test_preempted_sequences_keep_their_tokens(wanted: list[Case]) -> None:
    with cpu_engine(MODEL_DIR, page_size=4, kv_cache_tokens=256, max_model_len=256) as engine:
        engine.generate([PROMPT], SHORT)
        # With a stop id that no sample contains, admission cannot know that samples run to their limit.
        outputs = generate(engine, wanted, stop_token_ids=(unsampled(case.tokens for case in wanted),))
        assert engine.stats()["preemptions"] > 0
    assert_equal(outputs, wanted)


@pytest.mark.parametrize("groups", [True, False])
def test_eight_greedy_samples_are_equal_with_and_without_prefix_groups(wanted: list[Case], groups: bool) -> None:
    with cpu_engine(MODEL_DIR, prefix_groups=groups) as engine:
        group_eagerly(manager_of(engine))
        outputs = generate(engine, wanted[:4], n=8)
        assert (engine.stats()["group_rows"] > 0) == groups
    assert_equal(outputs, wanted[:4], n=8)


def test_64_batched_requests_equal_each_request_alone(grown: list[Case]) -> None:
    assert len(grown) == 64
    with cpu_engine(MODEL_DIR, max_running=64) as engine:
        outputs = generate(engine, grown)
        assert engine.stats()["steps"] < 2 * NEW  # the requests ran in one batch
    assert_equal(outputs, grown)
