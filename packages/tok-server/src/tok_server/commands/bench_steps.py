"""`tok bench steps`: time decode steps at several batch sizes, and compare them with their lower bound."""

from __future__ import annotations

import argparse

import msgspec
from msgspec import structs
from rich.console import Console
from rich.table import Table

from tok_core import Engine, EngineConfig, InvalidField
from tok_core.messages import EngineInfo
from tok_server.bench.steps import LEAD_TOKENS, StepTime, measure
from tok_server.bench.workloads.offline import without_tokenizer
from tok_server.flags import engine_config


def main(options: argparse.Namespace) -> int:
    """Measure and print the results. Errors: InvalidField, TokError."""
    batches = read_batch_sizes(options.batch_sizes)
    for field in ("prompt_tokens", "steps", "reps"):
        if getattr(options, field) < 1:
            raise InvalidField(field, getattr(options, field), "integers from 1")
    from tok_core.worker.startup.kernel_report import step_floor

    tokens = options.prompt_tokens + LEAD_TOKENS + options.steps
    config = structs.replace(engine_config(options), generation_config="none", max_model_len=tokens)
    floor = step_floor(config)
    with (
        without_tokenizer(config.model, config.data_dir) as model,
        _start(structs.replace(config, model=model), options.prompt_tokens) as engine,
    ):
        require_capacity(engine.info, max(batches), tokens)
        times = measure(engine, batches, options.prompt_tokens, options.steps, options.reps, floor)
        if options.json:
            for step_time in times:
                print(msgspec.json.encode(step_time).decode(), flush=True)
        else:
            show(list(times), engine.info, options.prompt_tokens, Console())
    return 0


def _start(config: EngineConfig, prompt_tokens: int) -> Engine:
    """Return an engine. Its error about the length, for which there is no flag here, names the flags that set it."""
    try:
        return Engine(config)
    except InvalidField as error:
        if error.field != "max_model_len":
            raise
        allowed = f"{error.allowed}, together with --steps and {LEAD_TOKENS} tokens before them"
        raise InvalidField("prompt_tokens", prompt_tokens, allowed) from error


def read_batch_sizes(text: str) -> list[int]:
    """Return the sizes of a list such as "1,4,8". Raises InvalidField."""
    sizes = text.split(",")
    if not all(size.isascii() and size.isdigit() and int(size) for size in sizes):
        raise InvalidField("batch_sizes", text, "integers from 1, separated by commas")
    return [int(size) for size in sizes]


def require_capacity(info: EngineInfo, batch: int, tokens: int) -> None:
    """Raise InvalidField unless `batch` sequences of `tokens` tokens can run at once."""
    pages = -(-tokens // info.page_size)
    max_batch = min(info.max_running, info.num_pages // pages)
    if batch > max_batch:
        raise InvalidField("batch_sizes", batch, f"at most {max_batch} sequences of {tokens} tokens at once")


def show(times: list[StepTime], info: EngineInfo, prompt_tokens: int, console: Console) -> None:
    """Print a row per batch size."""
    table = Table(title=f"decode steps, prompts of {prompt_tokens:,} tokens, {info.device}, {info.dtype}")
    floors = any(step_time.floor_ms is not None for step_time in times)
    for heading in ("batch", "ms a step", "min", "max", "tokens/s", *(("floor ms", "of floor") if floors else ())):
        table.add_column(heading, justify="right")
    for step_time in times:
        cells = [f"{step_time.batch:,}"]
        cells += [f"{ms:.3f}" for ms in (step_time.ms, step_time.min_ms, step_time.max_ms)]
        cells.append(f"{step_time.tokens_per_second:,.0f}")
        if step_time.floor_ms is not None:
            cells += [f"{step_time.floor_ms:.3f}", f"{step_time.floor_ms / step_time.ms:.0%}"]
        table.add_row(*cells)
    console.print(table)
