"""Dummy weights sample EOS ids, and the successors of a Markov chain, with the requested probabilities."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from support.engines import cpu_engine, random_prompts
from support.tiny_models import make_model
from tok_core import EngineConfig, InvalidField, SamplingParams
from tok_core.model_config import read_config
from tok_core.models import build, fill_dummy_weights
from tok_kernels import choose

CPU = torch.device("cpu")


def share_of_ends(path: Path, temperature: float, **options: float) -> tuple[int, int]:
    """Return how many sampled tokens are EOS ids, and how many were sampled. A sample stops at its first EOS id."""
    with cpu_engine(path, load_format="dummy", max_running=256, **options) as engine:
        params = SamplingParams(n=256, max_tokens=8, temperature=temperature, seed=1)
        ends, drawn = set(engine.info.eos_token_ids), 0
        found = 0
        for output in engine.generate(random_prompts((5, 9, 17, 30, 41)) * 4, params):
            for sample in output.outputs:
                drawn += len(sample.token_ids)
                found += sample.token_ids[-1] in ends
    return found, drawn


@pytest.mark.parametrize("kind", ["llama", "llama-untied"])
def test_dummy_weights_sample_eos_with_eos_probability(kind: str, tmp_path: Path) -> None:
    path, p = make_model(kind, tmp_path, layers=1), 1 / 16
    found, drawn = share_of_ends(path, 0.6, eos_probability=p)
    assert drawn >= 20_000
    assert abs(found - p * drawn) < 4 * math.sqrt(p * (1 - p) * drawn)


def test_eos_probability_holds_at_eos_temperature(tmp_path: Path) -> None:
    path, p = make_model("qwen3", tmp_path, layers=1), 1 / 16
    found, drawn = share_of_ends(path, 1.3, eos_probability=p, eos_temperature=1.3)
    assert drawn >= 20_000
    assert abs(found - p * drawn) < 4 * math.sqrt(p * (1 - p) * drawn)


def test_eos_is_as_likely_as_any_token_without_eos_probability(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path, layers=1)
    found, drawn = share_of_ends(path, 0.6)
    p = 2 / 512
    assert abs(found - p * drawn) < 4 * math.sqrt(p * (1 - p) * drawn)


@pytest.mark.parametrize("kind", ["llama", "llama-untied"])
def test_eos_probability_changes_only_coordinate_0_of_dummy_weights(kind: str, tmp_path: Path) -> None:
    config = read_config(make_model(kind, tmp_path))
    plain, ending = (build(config, choose(CPU), CPU, torch.bfloat16) for _ in range(2))
    fill_dummy_weights(plain, 5)
    fill_dummy_weights(ending, 5, eos_probability=0.25)
    changed = {}
    others = dict(plain.named_parameters())
    for name, parameter in ending.named_parameters():
        different = (parameter != others[name]).nonzero()
        if len(different):
            assert (different[:, -1] == 0).all()
            changed[name] = len(different)
    names = {"model.embed_tokens.weight", "model.norm.weight"}
    assert set(changed) == (names if config.tied else names | {"lm_head.weight"})
    assert ending.model.embed_tokens is not None
    lifts = set(ending.model.embed_tokens.weight[:, 0].tolist())
    assert len(lifts) == (2 if config.tied else 1)


def test_eos_probability_for_a_model_without_eos_ids_is_rejected(tmp_path: Path) -> None:
    config = dataclasses.replace(read_config(make_model("llama", tmp_path)), eos_token_ids=())
    with pytest.raises(InvalidField, match=r"eos_probability is 0\.5; allowed: none, because the model has no end id"):
        fill_dummy_weights(build(config, choose(CPU), CPU, torch.float32), eos_probability=0.5)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"eos_probability": 0.5}, "eos_probability is 0.5; allowed: only if load_format is dummy"),
        ({"load_format": "dummy", "eos_probability": 0.0}, "eos_probability is 0.0; allowed: above 0, below 1"),
        ({"load_format": "dummy", "eos_probability": 1.0}, "eos_probability is 1.0; allowed: above 0, below 1"),
        (
            {"load_format": "dummy", "eos_probability": 0.5, "eos_temperature": 0.0},
            "eos_temperature is 0.0; allowed: finite numbers above 0",
        ),
        ({"markov_probability": 0.5}, "markov_probability is 0.5; allowed: only if load_format is dummy"),
        (
            {"load_format": "dummy", "markov_probability": 0.9, "eos_probability": 0.1},
            "markov_probability is 0.9; allowed: below 1 together with eos_probability",
        ),
        ({"load_format": "dummy", "eos_temperature": 1.0}, "eos_temperature is 1.0; allowed: only together with"),
    ],
)
def test_invalid_eos_probability_settings_are_named(given: dict[str, float], told: str) -> None:
    with pytest.raises(InvalidField, match=told):
        EngineConfig(model="m", **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "dtype"), [("llama", "float32"), ("llama-untied", "float32"), ("qwen3", "bfloat16")])
def test_markov_weights_have_the_requested_probabilities(kind: str, dtype: str, tmp_path: Path) -> None:
    path, p, end = make_model(kind, tmp_path, layers=2), 0.7, 0.05
    options = {"eos_probability": end, "markov_probability": p, "eos_temperature": 0.8}
    follows: dict[int, Counter[int]] = {}
    ended = sampled = 0
    with cpu_engine(path, load_format="dummy", dtype=dtype, max_running=256, **options) as engine:
        ends = set(engine.info.eos_token_ids)
        params = SamplingParams(n=256, max_tokens=40, temperature=0.8, seed=1)
        for output in engine.generate(random_prompts((5, 9, 17)), params):
            for sample in output.outputs:
                for before, token in itertools.pairwise([output.prompt_token_ids[-1], *sample.token_ids]):
                    follows.setdefault(before, Counter())[token] += 1
                sampled += len(sample.token_ids)
                ended += sample.token_ids[-1] in ends
    assert sampled > 5_000
    assert abs(ended - end * sampled) < 5 * math.sqrt(end * (1 - end) * sampled)
    often = [counts for counts in follows.values() if counts.total() >= 100]
    successors = sum(max(counts.values()) for counts in often)
    count = sum(counts.total() for counts in often)
    assert count > sampled / 2
    tolerance = 0.0 if dtype == "float32" else 0.02
    assert abs(successors / count - p) < 5 * math.sqrt(p * (1 - p) / count) + tolerance
    assert len({counts.most_common(1)[0][0] for counts in often}) > 5
    language = {token for counts in follows.values() for token in counts} - ends
    assert len(language) <= (engine.info.hidden_size - 2) // 2


def test_markov_weights_need_an_mlp(tmp_path: Path) -> None:
    config = dataclasses.replace(read_config(make_model("llama", tmp_path)), intermediate_size=8)
    with pytest.raises(InvalidField, match=r"markov_probability is 0\.5; allowed: none, because the last layer"):
        fill_dummy_weights(build(config, choose(CPU), CPU, torch.float32), markov_probability=0.5)
