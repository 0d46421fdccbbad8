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
from tok_core.worker.startup.kv_scales import MAX_SCORED_TOKENS

SCORED = SamplingParams(max_tokens=0, prompt_logprobs=1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("qwen3", tmp_path_factory.mktemp("cache") / "qwen3")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if "without scales" in one.getMessage()]


def test_startup_warning_states_the_fp8_cache_error_of_requests(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = np.random.default_rng(0).integers(0, 512, MAX_SCORED_TOKENS).tolist()
    found, top = list[list[float]](), list[list[int]]()
    with caplog.at_level(logging.WARNING):
        for cache in ("auto", "fp8_unscaled"):
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


def test_startup_reports_the_same_error_whatever_a_step_takes(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reports = []
    for cache, level in (("fp8", logging.INFO), ("fp8_unscaled", logging.WARNING)):
        for most in (1024, 100):
            caplog.clear()
            with (
                caplog.at_level(logging.INFO, "tok_core"),
                cpu_engine(path, kv_cache_dtype=cache, max_step_tokens=most, max_running=4),
            ):
                (report,) = [one for one in caplog.records if "KV cache" in one.message]
            assert report.levelno == level
            reports.append(report.getMessage())
    assert "with scales calibrated on 512 random tokens: " in reports[0]
    assert "without scales: " in reports[2]
    assert reports[0] == reports[1]
    assert reports[2] == reports[3]
