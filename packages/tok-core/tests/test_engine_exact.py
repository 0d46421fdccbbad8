"""The engine's greedy tokens and log-probabilities equal transformers' in fp32, however they are computed.

Chunks of any size are tested for every kind of model, other properties for some kinds. All tests share one set of
prompts, because transformers' answers take most of the time. The answer to a prompt also serves for that prompt
extended by the first tokens of the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from support.engines import cpu_engine, manager_of, random_prompts
from support.grouping import group_eagerly
from support.short_lengths import PROMPT, SHORT, unsampled
from support.tiny_models import KINDS, make_model, reference_greedy
from tok_core import RequestOutput, SamplingParams

LENGTHS = (1, 2, 4, 5, 15, 16, 17, 33, 64, 65, 128, 200)
PROMPTS = dict(zip(LENGTHS, random_prompts(LENGTHS), strict=True))
GROWN = (0, 1, 3, 4, 7, 8)
NEW = 32
SOME_KINDS = ("llama3", "qwen2", "qwen3", "mixtral", "qwen2-moe", "qwen3-moe")  # RoPE scaling, biases, norms, experts


@dataclass(frozen=True)
class Case:
    """A prompt, and the greedy tokens and log-probabilities of transformers after it."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(params=KINDS)
def any_path(request: pytest.FixtureRequest, directory: Path) -> Path:
    return model(directory, request.param)


@pytest.fixture(params=SOME_KINDS)
def path(request: pytest.FixtureRequest, directory: Path) -> Path:
    return model(directory, request.param)


def model(directory: Path, kind: str) -> Path:
    path = directory / kind
    return path if path.exists() else make_model(kind, path)


def cases(path: Path, lengths: tuple[int, ...] = LENGTHS, grown: tuple[int, ...] = (0,)) -> list[Case]:
    """Return cases of prompts with these lengths, each extended by as many tokens of its answer as `grown` lists."""
    prompts = [PROMPTS[length] for length in lengths]
    answers = reference_greedy(path, prompts, NEW + max(GROWN))
    return [
        Case(prompt + tokens[:more], tokens[more : more + NEW], logprobs[more : more + NEW])
        for prompt, (tokens, logprobs) in zip(prompts, answers, strict=True)
        for more in grown
    ]


def asked(wanted: list[Case]) -> list[list[int]]:
    return [case.prompt for case in wanted]


def greedy(n: int = 1, stops: tuple[int, ...] = ()) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=0, n=n, stop_token_ids=stops)


def open_ended(wanted: list[Case], n: int = 1) -> SamplingParams:
    """Return greedy params with a stop token that is never sampled: the scheduler cannot know the length."""
    return greedy(n, (unsampled(case.tokens for case in wanted),))


def assert_equal(outputs: list[RequestOutput], wanted: list[Case], n: int = 1) -> None:
    for output, case in zip(outputs, wanted, strict=True):
        assert output.prompt_token_ids == case.prompt
        assert [sample.index for sample in output.outputs] == list(range(n))
        for sample in output.outputs:
            assert sample.token_ids == case.tokens
            assert sample.finish_reason == "length"
            assert sample.logprobs is not None
            np.testing.assert_allclose([one.logprob for one in sample.logprobs], case.logprobs, atol=1e-3)


def test_tiny_models_give_varied_greedy_answers(any_path: Path) -> None:
    wanted = cases(any_path)
    assert len({tuple(case.tokens) for case in wanted}) == len(LENGTHS)
    assert np.mean([len(set(case.tokens)) for case in wanted]) > NEW / 4


@pytest.mark.parametrize(
    ("chunk", "running", "lengths", "page_size"),
    [(1, 1, (1, 5, 33), 16), (7, 7, (2, 16, 64, 200), 4), (64, 64, LENGTHS, 16), (512, 64, LENGTHS, 4)],
)
def test_chunked_prefill_of_every_model_kind_equals_transformers(
    any_path: Path, chunk: int, running: int, lengths: tuple[int, ...], page_size: int
) -> None:
    wanted = cases(any_path, lengths)
    with cpu_engine(any_path, page_size=page_size, max_step_tokens=chunk, max_running=running) as one:
        assert_equal(one.generate(asked(wanted), greedy()), wanted)


@pytest.mark.parametrize("page_size", [4, 16])
def test_cached_prefixes_change_no_token(path: Path, page_size: int) -> None:
    wanted = cases(path)
    with cpu_engine(path, page_size=page_size) as one:
        first = one.generate(asked(wanted), greedy())
        again = one.generate(asked(wanted), greedy())
        assert_equal(again, wanted)
        assert [output.cached_tokens for output in first] == [0] * len(wanted)
        whole_pages = [(len(case.prompt) - 1) // page_size * page_size for case in wanted]
        assert [output.cached_tokens for output in again] == whole_pages


def test_generated_tokens_are_found_in_the_prefix_cache(directory: Path) -> None:
    path = model(directory, "llama3")
    wanted = cases(path, (33,), (0, max(GROWN)))
    with cpu_engine(path) as one:
        outputs = one.generate(asked(wanted[:1]), greedy())
        longer = [wanted[0].prompt + wanted[0].tokens]
        outputs += one.generate(longer, greedy())
        assert outputs[1].cached_tokens == 64  # of 65: the last token has no key and value yet
        ((tokens, logprobs),) = reference_greedy(path, longer, NEW)
        assert_equal(outputs, [wanted[0], Case(longer[0], tokens, logprobs)])
        outputs = one.generate(asked(wanted[1:]), greedy())  # 41 tokens; the cached ones end inside a page
        assert outputs[0].cached_tokens == 32
        assert_equal(outputs, wanted[1:])


@pytest.mark.parametrize("groups", [True, False])
def test_samples_of_a_prompt_share_its_prefill_and_equal_transformers(path: Path, groups: bool) -> None:
    wanted = cases(path, (1, 16, 17, 65, 200))
    with cpu_engine(path, prefix_groups=groups) as one:
        group_eagerly(manager_of(one))
        assert_equal(one.generate(asked(wanted), greedy(n=8)), wanted, n=8)
        stats = one.stats()
        assert (stats["group_rows"] > 0) == groups
        # Each prompt is computed once, and each sample's tokens once, except for the last.
        once = sum(len(case.prompt) for case in wanted) + len(wanted) * 8 * (NEW - 1)
        assert stats["computed_tokens"] - stats["discarded_tokens"] == once


def test_more_samples_than_slots_keep_their_order_and_tokens(directory: Path) -> None:
    path = model(directory, "llama")
    wanted = cases(path, (33, 17))
    with cpu_engine(path, max_running=3, max_step_tokens=16) as one:
        assert_equal(one.generate(asked(wanted), greedy(n=8)), wanted, n=8)


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_samples_have_the_same_tokens_with_few_and_with_enough_slots(directory: Path, temperature: float) -> None:
    path = model(directory, "llama")
    # Entries copied of the last page: some, all but one, none.
    prompts = [PROMPTS[length] for length in (4, 16, 17, 33)]
    params = SamplingParams(n=16, temperature=temperature, seed=5, max_tokens=12, ignore_eos=True)
    found = []
    for running in (64, 3):
        with cpu_engine(path, max_running=running) as one:
            # In one call, the prompts would take turns.
            outputs = [one.generate([prompt], params)[0] for prompt in prompts]
            found.append([[sample.token_ids for sample in output.outputs] for output in outputs])
            assert one.stats()["preemptions"] == 0
    assert found[0] == found[1]
    distinct = len({tuple(tokens) for tokens in found[0][0]})
    assert distinct == 1 if temperature == 0 else distinct > 12


def test_preempted_sequences_keep_their_tokens(path: Path) -> None:
    wanted = cases(path, LENGTHS[:-1])
    with cpu_engine(path, kv_cache_tokens=192, page_size=16, max_model_len=192) as one:
        one.generate([PROMPT], SHORT)
        outputs = one.generate(asked(wanted), open_ended(wanted))
        assert one.stats()["preemptions"] > 0
        assert_equal(outputs, wanted)


def test_preempted_samples_of_one_prompt_keep_their_tokens(path: Path) -> None:
    wanted = cases(path, (17, 33))
    with cpu_engine(path, kv_cache_tokens=256, page_size=4, max_model_len=256) as one:
        one.generate([PROMPT], SHORT)
        outputs = one.generate(asked(wanted), open_ended(wanted, n=8))
        assert one.stats()["preemptions"] > 0
        assert_equal(outputs, wanted, n=8)


def test_64_concurrent_requests_equal_transformers(path: Path) -> None:
    wanted = cases(path, grown=GROWN)[-64:]
    order = np.random.default_rng(1).permutation(len(wanted))
    wanted = [wanted[i] for i in order]
    with cpu_engine(path, max_running=64) as one:
        assert_equal(one.generate(asked(wanted), greedy()), wanted)
        assert one.stats()["steps"] < 2 * NEW  # the requests ran in the same steps
