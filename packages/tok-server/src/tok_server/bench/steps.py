"""Time decode steps of an engine at several batch sizes."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Final

import msgspec

from tok_core import Engine, SamplingParams
from tok_core.worker import StepFloor

LEAD_TOKENS: Final = 24
"""Output tokens of the shorter runs. The longer runs add the measured steps."""


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds of a decode step of `batch` sequences; `floor_ms` is None without a CUDA device."""

    batch: int
    ms: float
    min_ms: float
    max_ms: float
    tokens_per_second: float
    floor_ms: float | None


def measure(
    engine: Engine, batches: list[int], prompt_tokens: int, steps: int, reps: int, floor: StepFloor | None
) -> Iterator[StepTime]:
    """Yield the time of a decode step at each batch size: the median over `reps` runs.

    A run generates LEAD_TOKENS tokens, and then LEAD_TOKENS + `steps` tokens, from the same prompts. The difference
    between the two times is the time of the steps. Prompts are random and different, so that sequences share no pages.
    """
    for batch in batches:
        source = random.Random(batch)
        prompts = [source.choices(range(engine.info.vocab_size), k=prompt_tokens) for _ in range(batch)]
        generate = partial(_generate_seconds, engine, prompts)
        generate(LEAD_TOKENS)
        times = [(generate(LEAD_TOKENS + steps) - generate(LEAD_TOKENS)) / steps * 1e3 for _ in range(reps)]
        positions = prompt_tokens + LEAD_TOKENS + steps // 2
        yield StepTime(
            batch=batch,
            ms=round(median(times), 4),
            min_ms=round(min(times), 4),
            max_ms=round(max(times), 4),
            tokens_per_second=round(batch / median(times) * 1e3, 1),
            floor_ms=None if floor is None else round(floor.milliseconds(batch, positions), 4),
        )


def _generate_seconds(engine: Engine, prompts: list[list[int]], tokens: int) -> float:
    """Return the seconds to generate this number of tokens for each prompt."""
    began = time.perf_counter()
    engine.generate(prompts, SamplingParams(max_tokens=tokens, temperature=1.0, seed=0, ignore_eos=True))
    return time.perf_counter() - began
