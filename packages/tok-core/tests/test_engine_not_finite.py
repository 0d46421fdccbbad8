"""A request whose logits are not finite fails, whatever its params; the log reports it once, and others continue."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from support.engines import cpu_engine, random_prompts
from support.tiny_models import change_weights, make_model
from tok_core import Engine, RequestFailed, SamplingParams

BAD = 300  # a token that no random prompt holds, and whose embedding is NaN
NEW = 24
# Keep the token out of answers, too.
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=1, logit_bias={BAD: -100})


def spoil_embedding(weights: dict[str, Tensor]) -> None:
    weights["model.embed_tokens.weight"][BAD] = torch.nan


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = change_weights(make_model("llama-untied", tmp_path_factory.mktemp("models") / "nan"), spoil_embedding)
    with cpu_engine(path, max_step_tokens=64) as one:
        yield one


ASKED: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.0, "seed": 3},
    "filtered": {"temperature": 1.0, "top_k": 5, "top_p": 0.8, "min_p": 0.01},
    "edited": {"repetition_penalty": 1.5, "presence_penalty": 0.5, "logit_bias": {7: 3.0}},
    "four": {"temperature": 1.0, "n": 4, "logprobs": 3},
    "late": {"temperature": 1.0, "n": 90},
    "scored": {"prompt_logprobs": 2},
    "prompt alone": {"max_tokens": 0},
    "scored prompt alone": {"max_tokens": 0, "prompt_logprobs": 0},
    "at most one": {"max_tokens": 1},
}


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
@pytest.mark.parametrize("place", [0, 99])
def test_request_with_nan_logits_fails_and_others_keep_their_tokens(
    engine: Engine, asked: dict[str, object], place: int
) -> None:
    good = random_prompts((5, 17, 100))
    wanted = engine.generate(good, GREEDY)
    bad = random_prompts((100,), seed=place)[0]
    bad[place] = BAD
    beside = engine.stream(good, [replace(GREEDY, max_tokens=1), GREEDY, GREEDY])
    next(beside)  # the other requests are running
    with pytest.raises(RequestFailed, match=r"logits are not finite: .* the range of float32"):
        engine.generate([bad], SamplingParams(**{"max_tokens": NEW, **asked}))  # type: ignore[arg-type]
    for found in (dict(beside), dict(enumerate(engine.generate(good, GREEDY)))):
        assert {1, 2} <= set(found)
        for i, output in found.items():
            assert output.outputs[0].token_ids == wanted[i].outputs[0].token_ids
            ours, theirs = ([one.logprob for one in x.outputs[0].logprobs or ()] for x in (output, wanted[i]))
            np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embedding_that_is_not_finite_fails_its_request(engine: Engine, pooling: str) -> None:
    good, bad = random_prompts((20, 30))
    with pytest.raises(RequestFailed, match="not finite"):
        engine.embed([[*bad, BAD]], pooling=pooling)  # type: ignore[arg-type]
    (found,) = engine.embed([good], pooling=pooling)  # type: ignore[arg-type]
    assert np.isfinite(found.embedding).all()


def test_request_fails_when_its_sampled_token_causes_nan_logits(engine: Engine) -> None:
    (prompt,) = random_prompts((12,))
    with pytest.raises(RequestFailed):
        engine.generate([prompt], SamplingParams(max_tokens=NEW, logit_bias={BAD: 100.0}, ignore_eos=True))


def times(name: str, factor: float) -> Callable[[dict[str, Tensor]], object]:
    return lambda weights: [weight.mul_(factor) for key, weight in weights.items() if name in key]


@pytest.mark.parametrize(
    ("dtype", "cache", "change"),
    [
        ("float16", "auto", times("lm_head", 2e4)),  # logits overflow
        ("float16", "auto", times("down_proj", 3e4)),  # the residual stream overflows
        ("float32", "auto", times("k_proj", np.nan)),
        ("float32", "auto", times("v_proj", np.inf)),
        ("float32", "int8", times("k_proj", np.inf)),
        ("float32", "int8", times("v_proj", np.nan)),
        ("bfloat16", "auto", times("model.norm", np.nan)),
    ],
    ids=["logits", "residual stream", "keys", "values", "int8 keys", "int8 values", "norm"],
)
def test_models_with_overflow_or_nan_fail_every_request(
    dtype: str,
    cache: str,
    change: Callable[[dict[str, Tensor]], object],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = change_weights(make_model("llama-untied", tmp_path / "model"), change)
    with cpu_engine(path, dtype=dtype, kv_cache_dtype=cache) as engine, caplog.at_level(logging.ERROR):
        for prompt in random_prompts((3, 40, 7)):
            with pytest.raises(RequestFailed, match=f"the range of {dtype}"):
                engine.generate([prompt], GREEDY)
    assert len([one for one in caplog.records if "not finite" in one.getMessage()]) == 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16", "cuda_graphs": False},
        {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
        {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    ],
    ids=["graphs", "eager", "fp8", "int8"],
)
def test_requests_with_nan_logits_fail_on_gpu_and_others_do_not(options: dict[str, object], tmp_path: Path) -> None:
    path = change_weights(make_model("llama-untied", tmp_path / "model"), spoil_embedding)
    good, keys = random_prompts((5, 17, 100)), times("k_proj", np.nan)
    with cpu_engine(path, device="cuda", **options) as engine:
        wanted = engine.generate(good, GREEDY)
        for asked in ASKED.values():
            with pytest.raises(RequestFailed, match="not finite"):
                engine.generate([[*good[2], BAD]], SamplingParams(**{"max_tokens": NEW, **asked}))  # type: ignore[arg-type]
        again = engine.generate(good, GREEDY)
        for one, other in zip(again, wanted, strict=True):  # in bfloat16, rounding decides if the cache is used
            tokens = one.outputs[0].token_ids
            assert len(tokens) == NEW
            assert options["dtype"] != "float32" or tokens == other.outputs[0].token_ids
    with cpu_engine(change_weights(path, keys), device="cuda", **options) as engine:
        for prompt in good:
            with pytest.raises(RequestFailed, match="not finite"):
                engine.generate([prompt], GREEDY)
