"""Processed log-probabilities are those of the distribution that a token is sampled from, however it is computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from support.engines import cpu_engine, random_prompts
from support.tiny_models import make_model
from tok_core import Engine, EngineConfig, InvalidField, SamplingParams

pytestmark = pytest.mark.usefixtures("forked_children")

NEW = 6
LENGTHS = (7, 12, 3, 30, 21)  # of the prompts, one for each case
CASES = {
    "plain": SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=NEW, ignore_eos=True, logprobs=0),
    "cool": SamplingParams(temperature=0.4, seed=1, n=3, max_tokens=NEW, ignore_eos=True, logprobs=0),
    "greedy": SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=2),
    "filtered": SamplingParams(
        temperature=1.5, top_k=40, top_p=0.8, seed=2, n=3, max_tokens=NEW, ignore_eos=True, logprobs=3
    ),
    "biased": SamplingParams(
        temperature=0.7,
        logit_bias={5: 4.0, 9: -100.0},
        repetition_penalty=1.3,
        seed=3,
        n=2,
        max_tokens=NEW,
        ignore_eos=True,
        logprobs=0,
    ),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("processed") / "llama")


@pytest.fixture(scope="module")
def theirs(path: Path) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model


@pytest.fixture(scope="module", params=[{}, {"tp": 2}, {"pp": 2}], ids=["alone", "tp", "pp"])
def engine(request: pytest.FixtureRequest, path: Path) -> Iterator[Engine]:
    config = EngineConfig(
        model=str(path),
        device="cpu",
        dtype="float32",
        kv_cache_tokens=4096,
        max_running=16,
        logprobs_mode="processed_logprobs",
        **request.param,
    )
    with Engine(config, in_process=not request.param) as one:
        yield one


def plain_logprobs(logits: torch.Tensor, before: list[int], params: SamplingParams) -> torch.Tensor:
    """Return the log-probabilities of the distribution that the next token is sampled from."""
    scores = logits.double().clone()
    seen = torch.tensor(sorted(set(before)))
    if params.repetition_penalty != 1:
        value = scores[seen]
        scores[seen] = torch.where(value > 0, value / params.repetition_penalty, value * params.repetition_penalty)
    for token, bias in (params.logit_bias or {}).items():
        scores[token] += bias
    scores /= params.temperature or 1.0
    if params.top_k:
        scores[scores < scores.topk(params.top_k).values[-1]] = -torch.inf
    if params.top_p < 1:
        ranked, order = scores.sort(descending=True, stable=True)
        mass = ranked.softmax(-1)
        scores[order[mass.cumsum(-1) - mass >= params.top_p]] = -torch.inf
    return scores.log_softmax(-1)


def test_processed_logprobs_equal_transformers_logits_after_warping(engine: Engine, theirs: torch.nn.Module) -> None:
    prompts = random_prompts(LENGTHS)
    outputs = engine.generate(prompts, list(CASES.values()))
    for prompt, params, output in zip(prompts, CASES.values(), outputs, strict=True):
        for sample in output.outputs:
            tokens = prompt + sample.token_ids
            with torch.no_grad():
                logits = theirs(torch.tensor([tokens])).logits[0]
            assert sample.logprobs is not None
            for i, one in enumerate(sample.logprobs):
                at = len(prompt) + i
                exact = plain_logprobs(logits[at - 1], tokens[:at], params)
                assert one.logprob == pytest.approx(exact[tokens[at]].item(), abs=1e-3)
                for token, logprob in one.top:
                    assert logprob == pytest.approx(exact[token].item(), abs=1e-3)


def test_the_mode_changes_no_token(engine: Engine, path: Path) -> None:
    prompts = random_prompts(LENGTHS)
    with cpu_engine(path) as raw:
        expected = raw.generate(prompts, list(CASES.values()))
    found = engine.generate(prompts, list(CASES.values()))
    assert [[s.token_ids for s in one.outputs] for one in found] == [
        [s.token_ids for s in one.outputs] for one in expected
    ]
    for case, name in enumerate(CASES):
        ours, raw_ones = (one[case].outputs[0].logprobs or [] for one in (found, expected))
        deltas = [abs(a.logprob - b.logprob) for a, b in zip(ours, raw_ones, strict=True)]
        assert (max(deltas) < 1e-4) == (name in ("plain", "greedy")), name


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits"])
def test_modes_of_logits_are_refused(mode: str) -> None:
    with pytest.raises(InvalidField, match=f"logprobs_mode is '{mode}'; allowed: raw_logprobs, processed_logprobs"):
        EngineConfig(model="m", logprobs_mode=mode)  # type: ignore[arg-type]
