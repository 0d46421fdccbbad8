"""Trace steps in the middle of a workload, kernel by kernel, on a separate engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec

from tok_core import Engine, EngineClosed, EngineConfig, InvalidField, TokError
from tok_core.config import TRACE_WARM_UP, RankCoordinates
from tok_core.runtime import trace_files

POLL_SECONDS = 0.02


def tracing(config: EngineConfig, file: Path, steps: int, total_steps: int) -> EngineConfig:
    """Return `config` for an engine that traces `steps` steps in the middle of a run of `total_steps` steps.

    Errors: InvalidField if the run is too short.
    """
    max_steps = max((total_steps - TRACE_WARM_UP) // 2, 0)
    if steps > max_steps:
        raise InvalidField("trace_steps", steps, f"at most {max_steps}, because the run takes {total_steps} steps")
    first = max(TRACE_WARM_UP + 1, (total_steps - steps) // 2)
    return msgspec.structs.replace(config, trace=str(file.resolve()), trace_from=first, trace_steps=steps)


def run_traced(config: EngineConfig, work: Callable[[Engine], object]) -> dict[RankCoordinates, Path]:
    """Run `work` on a new engine until all traces of `config` are written. Returns each worker's trace file.

    The engine is then closed, so the rest of `work` is not done. Errors: those of the engine; TokError if `work` ends
    before the traces are written.
    """
    files = trace_files(config)
    for file in files.values():
        file.unlink(missing_ok=True)
    with ThreadPoolExecutor(1) as pool:
        with Engine(config) as engine:
            run: Future[object] = pool.submit(work, engine)
            while not (_all_exist(files) or run.done()):
                time.sleep(POLL_SECONDS)
        with suppress(EngineClosed):
            run.result()
    if not _all_exist(files):
        raise TokError(f"the run ended before {config.trace_steps} steps from step {config.trace_from} were traced")
    return files


def _all_exist(files: dict[RankCoordinates, Path]) -> bool:
    return all(file.exists() for file in files.values())
