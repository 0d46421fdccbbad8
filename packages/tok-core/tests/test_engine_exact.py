"""The engine's greedy tokens and log-probabilities equal transformers' in fp32, whatever way they are computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from support.engines import cpu_engine, random_prompts
from support.tiny_models import KINDS, make_model, reference_greedy
from tok_core import RequestOutput, SamplingParams

LENGTHS = (1, 2, 3, 4, 5, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 200)
NEW = 64


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def model(directory: Path, kind: str) -> Path:
    path = directory / kind
    return path if path.exists() else make_model(kind, path)


def prompts(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[list[int]]:
    return random_prompts(lengths, seed)


def greedy(n: int = 1, tokens: int = NEW) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0, n=n)


def assert_equals_reference(outputs: list[RequestOutput], path: Path, asked: list[list[int]]) -> None:
    wanted = reference_greedy(path, asked, len(outputs[0].outputs[0].token_ids))
    for output, (tokens, logprobs) in zip(outputs, wanted, strict=True):
        assert [sample.index for sample in output.outputs] == list(range(len(output.outputs)))
        for sample in output.outputs:
            assert sample.token_ids == list(tokens)
            assert sample.finish_reason == "length"
            assert sample.logprobs is not None
            np.testing.assert_allclose([one.logprob for one in sample.logprobs], logprobs, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_size", [4, 16])
def test_every_kind_of_model_gives_the_tokens_of_transformers(directory: Path, kind: str, page_size: int) -> None:
    path, asked = model(directory, kind), prompts()
    with cpu_engine(path, page_size=page_size) as one:
        assert_equals_reference(one.generate(asked, greedy()), path, asked)


@pytest.mark.parametrize(("chunk", "running"), [(1, 1), (7, 4), (64, 64), (512, 64)])
@pytest.mark.parametrize("page_size", [4, 16])
def test_chunked_prefill_changes_no_token(directory: Path, chunk: int, running: int, page_size: int) -> None:
    path, asked = model(directory, "llama3"), prompts((1, 5, 33, 64, 200) if chunk == 1 else LENGTHS)
    with cpu_engine(path, page_size=page_size, max_step_tokens=chunk, max_running=running) as one:
        assert_equals_reference(one.generate(asked, greedy()), path, asked)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_cached_prefixes_change_no_token(directory: Path, kind: str) -> None:
    path, asked = model(directory, kind), prompts()
    with cpu_engine(path) as one:
        first = one.generate(asked, greedy())
        again = one.generate(asked, greedy())
        assert_equals_reference(again, path, asked)
        assert [output.cached_tokens for output in first] == [0] * len(asked)
        assert [output.cached_tokens for output in again] == [(len(ids) - 1) // 16 * 16 for ids in asked]


def test_generated_tokens_are_cached_too(directory: Path) -> None:
    path, asked = model(directory, "llama"), prompts((33,))
    with cpu_engine(path) as one:
        first = one.generate(asked, greedy())[0].outputs[0].token_ids
        longer = [asked[0] + first]
        output = one.generate(longer, greedy())
        assert output[0].cached_tokens == 96  # of 97: the last token had no key and value yet
        assert_equals_reference(output, path, longer)


@pytest.mark.parametrize("groups", [True, False])
def test_samples_of_one_prompt_share_it_and_equal_each_other(directory: Path, groups: bool) -> None:
    path, asked = model(directory, "qwen2"), prompts((1, 16, 17, 50, 200))
    with cpu_engine(path, prefix_groups=groups) as one:
        outputs = one.generate(asked, greedy(n=8))
        assert_equals_reference(outputs, path, asked)
        stats = one.stats()
        assert (stats["group_rows"] > 0) == groups
        # Each prompt is computed once, each sample's tokens but its last once.
        assert stats["computed_tokens"] - stats["discarded_tokens"] == sum(map(len, asked)) + 5 * 8 * (NEW - 1)


def test_more_samples_than_slots_all_arrive_in_order(directory: Path) -> None:
    path, asked = model(directory, "llama"), prompts((40, 20))
    with cpu_engine(path, max_running=3, max_step_tokens=16) as one:
        assert_equals_reference(one.generate(asked, greedy(n=8)), path, asked)


def test_preempted_sequences_keep_their_tokens(directory: Path) -> None:
    path, asked = model(directory, "llama3"), prompts((60, 70, 80, 90, 100, 110))
    with cpu_engine(path, kv_cache_tokens=256, page_size=4, max_model_len=256) as one:
        outputs = one.generate(asked, greedy())
        assert one.stats()["preemptions"] > 0
        assert_equals_reference(outputs, path, asked)


def test_many_requests_at_once_equal_each_alone(directory: Path) -> None:
    path = model(directory, "qwen3")
    shared = prompts((48,), seed=5)[0]
    asked = [shared + tail for tail in prompts(tuple(range(1, 33)), seed=6)] + prompts(tuple(range(1, 65, 2)), seed=7)
    with cpu_engine(path, max_running=64) as one:
        assert_equals_reference(one.generate(asked, greedy()), path, asked)
