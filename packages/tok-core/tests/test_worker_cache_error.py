"""The start warns of an FP8 KV cache without scales, with the error that it causes in the model."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import numpy as np
import pytest

from support.engines import cpu_engine
from support.tiny_models import make_model
from tok_core import SamplingParams
from tok_core.worker.startup.cache_error import MAX_TOKENS

SCORED = SamplingParams(max_tokens=0, prompt_logprobs=1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("qwen3", tmp_path_factory.mktemp("cache") / "qwen3")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if "without scales" in one.getMessage()]


def test_startup_warning_states_the_fp8_cache_error_of_requests(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = np.random.default_rng(0).integers(0, 512, MAX_TOKENS).tolist()
    found, top = list[list[float]](), list[list[int]]()
    with caplog.at_level(logging.WARNING):
        for cache in ("auto", "fp8"):
            assert warnings_of(caplog) == []
            with cpu_engine(path, kv_cache_dtype=cache) as engine:
                (output,) = engine.generate([text], SCORED)
            assert output.prompt_logprobs is not None
            scores = [one for one in output.prompt_logprobs if one is not None]
            found.append([one.logprob for one in scores])
            top.append([one.top[0][0] for one in scores])
    (message,) = warnings_of(caplog)
    numbers = re.search(
        r"float8_e4m3fn without scales: .* of 255 .* differ by (\S+) on average, and by (\S+) at most, .*"
        r"cache of float32; another token is the most likely one in (\S+) %",
        message,
    )
    assert numbers is not None
    error = np.abs(np.array(found[0]) - np.array(found[1]))
    other = 100 * np.mean([one != two for one, two in zip(*top, strict=True)])
    assert error.mean() > 1e-3
    np.testing.assert_allclose([float(one) for one in numbers.groups()], [error.mean(), error.max(), other], rtol=0.06)


def test_startup_warns_of_fp8_cache_with_too_few_tokens_to_measure(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), cpu_engine(path, kv_cache_dtype="fp8", max_step_tokens=1, max_running=1):
        assert len(warnings_of(caplog)) == 1
