"""Nested prefix groups change no token and no log-probability in fp32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from support.engines import cpu_engine, manager_of, random_prompts
from support.tiny_models import make_model
from tok_core import RequestOutput, SamplingParams
from tok_core.manager.prefix_groups.cascade import CascadeCosts
from tok_core.manager.prefix_groups.grouping import Grouping, MostPagesSaved
from tok_core.messages import StepInput

PARAMS = SamplingParams(n=3, temperature=0.8, seed=3, max_tokens=24, ignore_eos=True, logprobs=0)


def questions() -> list[list[int]]:
    """Return prompts of a common system prompt, examples that half of them share, and a short question each."""
    system, *parts = random_prompts((100, 70, 70, *range(20, 38, 2)))
    return [system + parts[i % 2] + question for i, question in enumerate(parts[2:])]


def answers(path: Path, nested: bool, page_size: int, device: str) -> tuple[list[RequestOutput], set[int]]:
    """Return the engine's outputs, and the numbers of cascade levels in its steps."""
    levels = set()
    with cpu_engine(path, prefix_groups=nested, page_size=page_size, device=device) as engine:
        manager = manager_of(engine)
        if nested:
            manager.scheduler.groupings = [
                Grouping(manager.paging.tree, MostPagesSaved(CascadeCosts(member=0.01, group=0.02, level=0)))
            ]
        send = manager.ports.send

        def watched(step: StepInput) -> None:
            levels.add(len(step.levels))
            send(step)

        manager.ports.send = watched  # type: ignore[method-assign]
        return engine.generate(questions(), PARAMS), levels


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_nested_prefix_groups_change_no_token(tmp_path: Path, kind: str, page_size: int, device: str) -> None:
    path = make_model(kind, tmp_path / kind)
    (plain, none), (nested, several) = (answers(path, groups, page_size, device) for groups in (False, True))
    assert none == {0}
    assert 2 in several
    for one, other in zip(plain, nested, strict=True):
        for a, b in zip(one.outputs, other.outputs, strict=True):
            assert a.token_ids == b.token_ids
            assert a.logprobs is not None
            assert b.logprobs is not None
            np.testing.assert_allclose([x.logprob for x in a.logprobs], [x.logprob for x in b.logprobs], atol=1e-3)
