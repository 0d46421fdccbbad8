"""A sequence preempted for a higher priority or for another tenant continues with unchanged tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.engines import cpu_engine, manager_of, random_prompts
from support.patience import wait_until
from support.tiny_models import make_model, reference_greedy
from tok_core import Engine, RequestOutput, SamplingParams
from tok_core.engine.open_requests import OpenRequest
from tok_core.manager.admission.fair_shares import QUANTUM
from tok_core.sampling_params import Grammar

PROMPTS = random_prompts((5, 16, 17, 33, 40, 65, 70, 90))
NEW = 40
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
WORDS = Grammar(kind="regex", value="(apples|baskets|dogs)( (apples|baskets|dogs)){7}")
KINDS: dict[str, dict[str, Any]] = {
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.3},
    "logprobs": {"logprobs": 2},
    "sampled": {"temperature": 1.0, "top_p": 0.9, "seed": 5},
    "stop": {"stop": ("never in it", "zz"), "min_tokens": 3},
    "grammar": {"grammar": WORDS, "ignore_eos": False, "max_tokens": 60},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("fairness") / "tiny", max_positions=2048)


@pytest.fixture
def engine(path: Path) -> Iterator[Engine]:
    with cpu_engine(path, max_running=4, kv_cache_tokens=8192) as one:
        yield one


def submit(engine: Engine, prompt: list[int], params: SamplingParams, tenant: str = "") -> OpenRequest:
    return engine._core.submit(prompt, params, None, lambda _: None, stream=params.seed is None, tenant=tenant)


def outputs(requests: list[OpenRequest]) -> list[RequestOutput]:
    for one in requests:
        wait_until(one.ended)
        one.take()
    return [one.output() for one in requests]


def crowd(engine: Engine, low: SamplingParams, high: SamplingParams) -> tuple[list[RequestOutput], list[RequestOutput]]:
    """Return outputs of requests that hold all slots, and of those for which they are preempted."""
    table = manager_of(engine).table
    lower = [submit(engine, prompt, low) for prompt in PROMPTS[:4]]
    wait_until(lambda: not table.free_slots)
    higher = [submit(engine, prompt, high) for prompt in PROMPTS[4:]]
    return outputs(lower), outputs(higher)


@pytest.mark.parametrize("n", [1, 3])
def test_greedy_tokens_equal_transformers_after_priority_preemption(engine: Engine, path: Path, n: int) -> None:
    low = msgspec.structs.replace(GREEDY, n=n, priority=1)
    for group, prompts in zip(crowd(engine, low, GREEDY), (PROMPTS[:4], PROMPTS[4:]), strict=True):
        for output, (tokens, _) in zip(group, reference_greedy(path, prompts, NEW), strict=True):
            assert [sample.token_ids for sample in output.outputs] == [tokens] * len(output.outputs)
    assert engine.stats()["preemptions"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_sampling_options_keep_their_results_after_preemption(engine: Engine, kind: str) -> None:
    low = msgspec.structs.replace(GREEDY, n=2, priority=1, **KINDS[kind])
    alone = [outputs([submit(engine, prompt, low)])[0] for prompt in PROMPTS[:4]]
    before = engine.stats()["preemptions"]
    crowded, _ = crowd(engine, low, GREEDY)
    assert engine.stats()["preemptions"] > before
    for one, other in zip(alone, crowded, strict=True):
        for sample, again in zip(one.outputs, other.outputs, strict=True):
            assert again.token_ids == sample.token_ids
            assert (again.text, again.finish_reason) == (sample.text, sample.finish_reason)
            if sample.logprobs is not None and again.logprobs is not None:
                for wanted, found in zip(sample.logprobs, again.logprobs, strict=True):
                    assert found.logprob == pytest.approx(wanted.logprob, abs=1e-4)


def test_huge_request_is_preempted_for_another_tenant_and_completes(engine: Engine, path: Path) -> None:
    manager, ticks = manager_of(engine), itertools.count()
    # Every tenant has waited long at each read of the clock, however fast the machine.
    manager.scheduler.fair_shares._clock = lambda: next(ticks) * QUANTUM
    huge = submit(engine, PROMPTS[0], msgspec.structs.replace(GREEDY, n=12, max_tokens=150), "A")
    wait_until(lambda: not manager.table.free_slots)
    other = submit(engine, PROMPTS[1], msgspec.structs.replace(GREEDY, max_tokens=8), "B")
    wait_until(other.ended)
    assert not huge.ended()
    assert engine.stats()["preemptions"] > 0
    ((tokens, _),), ((short, _),) = (reference_greedy(path, [PROMPTS[i]], most) for i, most in ((0, 150), (1, 8)))
    assert outputs([other])[0].outputs[0].token_ids == short
    assert [sample.token_ids for sample in outputs([huge])[0].outputs] == [tokens] * 12
