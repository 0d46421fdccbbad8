"""Prompts, parameters and settings by which drafts are shown to change no answer."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from support.engines import cpu_engine, manager_of, random_prompts
from tok_core import Engine, EngineError, InvalidField, ModelError, RequestOutput, SamplingParams
from tok_core.manager.speculation import Drafts, HostSpeculator
from tok_core.manager.speculation.ngram_index import NO_TOKEN
from tok_core.manager.speculation.step_costs import DraftCandidate
from tok_core.messages import Int64, ModelDrafts
from tok_core.sampling_params import Grammar
from tok_core.worker.draft_model import LaunchPass

NEW = 40
STEM, *PARTS = random_prompts((33, 1, 15, 40), seed=5)
PROMPTS = [STEM, STEM + PARTS[0], STEM + PARTS[1], PARTS[2]]
PLAIN = SamplingParams(temperature=1.0, seed=3, max_tokens=NEW, ignore_eos=True, logprobs=0)
WORDS = Grammar(kind="regex", value="(apples|baskets|dogs)( (apples|baskets|dogs)){3}")
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=2),
    "plain": PLAIN,
    "samples": SamplingParams(n=5, temperature=0.4, seed=1, max_tokens=NEW, ignore_eos=True, logprobs=0),
    "filters": SamplingParams(n=2, temperature=0.8, seed=2, top_k=20, top_p=0.9, max_tokens=NEW, logprobs=3),
    "penalties": SamplingParams(
        n=2, temperature=0.7, seed=4, presence_penalty=0.6, repetition_penalty=1.2, max_tokens=NEW, ignore_eos=True
    ),
    "min_tokens": SamplingParams(n=3, temperature=1.2, seed=6, min_tokens=20, stop_token_ids=(9, 30), max_tokens=NEW),
    "bad_words": SamplingParams(temperature=0.5, seed=8, bad_words=("a", "the"), max_tokens=NEW, ignore_eos=True),
    "grammar": SamplingParams(temperature=1.0, seed=9, grammar=WORDS, max_tokens=NEW),
    "one_token": SamplingParams(temperature=0, max_tokens=1),
}
# `speculate`, and other settings: of small and large pages, with preemption, chunked prompts, and no prefix groups.
SETTINGS: tuple[tuple[int, dict[str, Any]], ...] = (
    (4, {"max_running": 256}),
    (3, {"page_size": 4, "run_ahead": 4, "max_running": 256}),
    (4, {"page_size": 4, "kv_cache_tokens": 240, "max_running": 32}),  # preempts
    (16, {"page_size": 1, "max_step_tokens": 48, "max_running": 16, "run_ahead": 1}),
    (8, {"prefix_groups": False, "max_running": 256}),
)
Answer = list[tuple[list[int], object, str | None, object]]


def answer(output: RequestOutput) -> Answer:
    """Return what must not depend on drafts."""
    return [(one.token_ids, one.logprobs, one.finish_reason, one.stop_reason) for one in output.outputs]


def answers(engine: Engine, named: Mapping[str, SamplingParams] = PARAMS) -> list[Answer]:
    """Return the answers to all prompts with all parameters, which run together."""
    asked = [(prompt, params) for params in named.values() for prompt in PROMPTS]
    prompts, params = zip(*asked, strict=True)
    return [answer(output) for output in engine.generate(list(prompts), list(params))]


def make_cheap(engine: object) -> None:
    """Let the engine assume that passes of the draft model take no time, since it is as large as the model."""
    speculator = manager_of(engine).speculator
    assert isinstance(speculator, HostSpeculator)
    speculator.costs._pass_share = 1e-6


def draft_often(engine: object) -> None:
    """Let every source draft in four of five turns, whatever it costs: the model as much as it can."""
    speculator, turn = manager_of(engine).speculator, itertools.count()
    assert isinstance(speculator, HostSpeculator)

    def choose_among(sequences: int, candidates: Sequence[DraftCandidate]) -> tuple[int, int]:
        return (0, 0) if next(turn) % 5 == 4 else (len(candidates) - 1, len(candidates[-1].probability))

    setattr(speculator.costs, "choose_among", choose_among)  # noqa: B010


def pad_passes(engine: object, sizes: Sequence[int]) -> Counter[int]:
    """Let passes run as they are captured on a GPU, without a graph; return how often each size will have run."""
    replays = Counter[int]()

    def record(launch: LaunchPass) -> LaunchPass:
        def replay() -> None:
            replays[len(launch.args[0])] += 1  # type: ignore[attr-defined]
            launch()

        return replay

    manager_of(engine).ports._runner.draft_model.graphs.capture(sizes, record)  # type: ignore[attr-defined]
    return replays


class Draft(NamedTuple):
    """Tokens of a sequence, those drafted to follow, and the keys of the sequence's random numbers."""

    tokens: list[int]
    drafted: list[int]
    seed: int
    sample: int


def record_drafts(engine: Engine) -> list[Draft]:
    """Let the draft model draft alone; return a list that grows by its drafts."""
    speculator = manager_of(engine).speculator
    assert isinstance(speculator, HostSpeculator)
    assert speculator.model is not None
    drafts, texts, keys = list[Draft](), list[list[int]](), list[list[int]]()
    state = manager_of(engine).ports._runner.state  # type: ignore[attr-defined]
    write, verified = speculator.model.write, speculator.verified

    def recording_write(chunks: Int64, slots: Int64, lent: Int64) -> ModelDrafts:
        table = speculator._table
        texts[:] = [table.tokens[slot, : table.length[slot] + 1].tolist() for slot in slots]
        keys[:] = state.random_keys[:2, slots.tolist()].T.tolist()
        return write(chunks, slots, lent)

    def recording_verified(found: Drafts, right: Any) -> None:
        drafted = [row[row >= 0].tolist() for row in found.token[: found.models]]
        drafts.extend(map(Draft, texts, drafted, *zip(*keys, strict=True)) if drafted else ())
        verified(found, right)

    none = np.full((64, 16), NO_TOKEN, np.int32), np.zeros((64, 16))
    setattr(speculator, "propose", lambda slots, count: tuple(one[: len(slots), :count].copy() for one in none))  # noqa: B010
    setattr(speculator.model, "write", recording_write)  # noqa: B010
    setattr(speculator, "verified", recording_verified)  # noqa: B010
    return drafts


def refused(path: Path, draft: Path | str, **options: Any) -> str:
    """Return the error of the start of an engine with this draft model, which is one line."""
    with (
        pytest.raises((InvalidField, ModelError, EngineError)) as caught,
        cpu_engine(path, speculate=2, draft=str(draft), **options),
    ):
        pass
    assert "\n" not in str(caught.value)
    return str(caught.value)
