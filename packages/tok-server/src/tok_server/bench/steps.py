"""`tok bench steps`: time a decode step at several batch sizes, beside the least time that this machine allows."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Final

import msgspec
from msgspec import structs
from rich.console import Console
from rich.table import Table

from tok_core import Engine, InvalidField, SamplingParams
from tok_core.messages import EngineInfo
from tok_core.worker import StepFloor
from tok_server.bench.workloads.offline import without_tokenizer
from tok_server.flags import engine_config

LEAD_TOKENS: Final = 24
"""Output tokens of the shorter runs; the longer ones have the measured steps more."""


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds of a decode step of `batch` sequences; `floor_ms` is None without a CUDA device."""

    batch: int
    ms: float
    min_ms: float
    max_ms: float
    tokens_per_second: float
    floor_ms: float | None


def main(options: argparse.Namespace) -> int:
    """Measure and print the results. Errors: InvalidField, TokError."""
    batches = read_batch_sizes(options.batch_sizes)
    for field in ("prompt_tokens", "steps", "reps"):
        if getattr(options, field) < 1:
            raise InvalidField(field, getattr(options, field), "integers from 1")
    from tok_core.worker.startup.kernel_choice import step_floor

    tokens = options.prompt_tokens + LEAD_TOKENS + options.steps
    config = structs.replace(engine_config(options), generation_config="none", max_model_len=tokens)
    floor = step_floor(config)
    with (
        without_tokenizer(config.model, config.data_dir) as model,
        Engine(structs.replace(config, model=model)) as engine,
    ):
        require_room(engine.info, max(batches), tokens)
        times = measure(engine, batches, options.prompt_tokens, options.steps, options.reps, floor)
        if options.json:
            for one in times:
                print(msgspec.json.encode(one).decode(), flush=True)
        else:
            show(list(times), engine.info, options.prompt_tokens, Console())
    return 0


def read_batch_sizes(text: str) -> list[int]:
    """Return the sizes of a list such as "1,4,8". Raises InvalidField."""
    sizes = text.split(",")
    if not all(size.isascii() and size.isdigit() and int(size) for size in sizes):
        raise InvalidField("batch_sizes", text, "integers from 1, separated by commas")
    return [int(size) for size in sizes]


def require_room(info: EngineInfo, batch: int, tokens: int) -> None:
    """Raise InvalidField unless `batch` sequences of so many tokens run at once."""
    pages = -(-tokens // info.page_size)
    most = min(info.max_running, info.num_pages // pages)
    if batch > most:
        raise InvalidField("batch_sizes", batch, f"at most {most} sequences of {tokens} tokens at once")


def measure(
    engine: Engine, batches: list[int], prompt_tokens: int, steps: int, reps: int, floor: StepFloor | None
) -> Iterator[StepTime]:
    """Yield the time of a decode step at each batch size: the median over `reps` runs.

    Each run generates a few tokens, then `steps` more of them, from the same prompts; the difference in time is that of
    the steps. Prompts are random and different, so that no sequences share pages.
    """
    for batch in batches:
        source = random.Random(batch)
        prompts = [source.choices(range(engine.info.vocab_size), k=prompt_tokens) for _ in range(batch)]
        seconds = _timer(engine, prompts)
        seconds(LEAD_TOKENS)
        times = [(seconds(LEAD_TOKENS + steps) - seconds(LEAD_TOKENS)) / steps * 1e3 for _ in range(reps)]
        positions = prompt_tokens + LEAD_TOKENS + steps // 2
        yield StepTime(
            batch=batch,
            ms=round(median(times), 4),
            min_ms=round(min(times), 4),
            max_ms=round(max(times), 4),
            tokens_per_second=round(batch / median(times) * 1e3, 1),
            floor_ms=None if floor is None else round(floor.milliseconds(batch, positions), 4),
        )


def _timer(engine: Engine, prompts: list[list[int]]) -> Callable[[int], float]:
    """Return a function that takes a number of tokens, and returns the seconds to generate them for each prompt."""

    def seconds(tokens: int) -> float:
        began = time.perf_counter()
        engine.generate(prompts, SamplingParams(max_tokens=tokens, temperature=1.0, seed=0, ignore_eos=True))
        return time.perf_counter() - began

    return seconds


def show(times: list[StepTime], info: EngineInfo, prompt_tokens: int, console: Console) -> None:
    """Print a row per batch size."""
    table = Table(title=f"decode steps, prompts of {prompt_tokens:,} tokens, {info.device}, {info.dtype}")
    floors = any(one.floor_ms is not None for one in times)
    for heading in ("batch", "ms a step", "least", "most", "tokens/s", *(("floor ms", "of floor") if floors else ())):
        table.add_column(heading, justify="right")
    for one in times:
        cells = [f"{one.batch:,}", f"{one.ms:.3f}", f"{one.min_ms:.3f}", f"{one.max_ms:.3f}"]
        cells.append(f"{one.tokens_per_second:,.0f}")
        if one.floor_ms is not None:
            cells += [f"{one.floor_ms:.3f}", f"{one.floor_ms / one.ms:.0%}"]
        table.add_row(*cells)
    console.print(table)
