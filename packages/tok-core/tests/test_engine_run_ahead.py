"""Requests end with the same tokens for any number of steps queued ahead of their tokens, one or more."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from support.engines import random_prompts
from support.patience import PATIENCE
from support.short_lengths import PROMPT, SHORT
from support.tiny_models import make_model
from tok_core import AsyncEngine, EngineConfig, SamplingParams

PROMPTS = random_prompts((1, 3, 16, 17, 33, 40, 64, 90), seed=9)


@dataclass(frozen=True)
class Answers:
    """Results of the workload: tokens, finish reasons, and the number of preemptions."""

    tokens: list[list[list[int]]]
    reasons: list[list[str | None]]
    preemptions: float


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama3", tmp_path_factory.mktemp("ahead") / "llama3")


def workload() -> list[SamplingParams]:
    """Return greedy and seeded params, of one and several samples, that end by length and by a stop token."""
    stops = tuple(range(0, 300, 40))
    return [
        SamplingParams(
            temperature=0 if i % 2 else 0.9,
            seed=i,
            n=1 + i % 3,
            max_tokens=1 if i == 3 else 48,
            ignore_eos=True,
            stop_token_ids=stops if i % 4 == 2 else (),
        )
        for i in range(len(PROMPTS))
    ]


async def answers(path: Path, run_ahead: int | None, *, in_process: bool) -> Answers:
    config = EngineConfig(
        model=str(path),
        device="cpu",
        dtype="float32",
        page_size=4,
        kv_cache_tokens=320,
        max_model_len=256,
        max_running=8,
        max_step_tokens=24,
        run_ahead=run_ahead,
    )
    engine = AsyncEngine(config, in_process=in_process)
    async with asyncio.timeout(PATIENCE):
        await engine.start()
    try:
        await engine.generate(PROMPT, SHORT).output()
        cancelled = engine.generate(PROMPTS[-1], SamplingParams(max_tokens=100, ignore_eos=True))
        streams = [engine.generate(*one) for one in zip(PROMPTS, workload(), strict=True)]
        async with asyncio.timeout(PATIENCE):
            await anext(aiter(cancelled))
            cancelled.abort()
            outputs = [await stream.output() for stream in streams]
        return Answers(
            [[sample.token_ids for sample in output.outputs] for output in outputs],
            [[sample.finish_reason for sample in output.outputs] for output in outputs],
            engine.stats()["preemptions"],
        )
    finally:
        await engine.close()


@cache
def expected(path: Path) -> Answers:
    """Return the answers of an in-process engine with four steps ahead."""
    return asyncio.run(answers(path, 4, in_process=True))


def test_workload_ends_by_length_and_by_stop_and_is_preempted(path: Path) -> None:
    reasons = [reason for one in expected(path).reasons for reason in one]
    assert set(reasons) == {"length", "stop"}
    assert expected(path).preemptions > 0
    lengths = [len(tokens) for one in expected(path).tokens for tokens in one]
    assert np.ptp(lengths) > 20


@pytest.mark.parametrize(("run_ahead", "in_process"), [(1, True), (16, True), (None, True), (1, False), (None, False)])
def test_run_ahead_changes_no_token_and_no_finish_reason(path: Path, run_ahead: int | None, in_process: bool) -> None:
    found = asyncio.run(answers(path, run_ahead, in_process=in_process))
    assert found.tokens == expected(path).tokens
    assert found.reasons == expected(path).reasons
