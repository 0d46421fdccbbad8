"""Measure what an engine compiles, captures and allocates after it is ready, in a fresh process."""

from __future__ import annotations

import itertools
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

from support.engines import manager_of, random_prompts
from tok_core import Engine, EngineConfig, SamplingParams
from tok_core.config import BackendName
from tok_core.messages import StepInput
from tok_core.worker import cuda_graphs
from tok_core.worker.runner import LaunchedStep, Runner


class SetUpLate(NamedTuple):
    """Triton kernels compiled, graphs captured and memory blocks allocated by the driver after the engine is ready.

    `waits` holds the lines where the host waited for the device while launching steps.
    """

    kernels: list[str]
    graphs: int
    blocks: int
    waits: set[str]


def set_up_late(path: Path, backend: BackendName = "auto", *, late_graphs: bool = False) -> SetUpLate:
    """Run a bfloat16 engine over requests of every kind in a process of its own, and return what it set up late.

    late_graphs  leave all CUDA graphs but the largest to the steps that need them, as engines do
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_serve, path, backend, late_graphs).result(timeout=300)


def _serve(path: Path, backend: BackendName, late_graphs: bool) -> SetUpLate:
    from triton import knobs  # type: ignore[import-untyped]

    sizes: dict[str, Any] = {"max_running": 300, "kv_cache_tokens": 65_536, "max_step_tokens": 1024}
    config = EngineConfig(model=str(path), device="cuda", backend=backend, **sizes)
    late: list[str] = []
    if not late_graphs:
        cuda_graphs.MAX_STALL_SECONDS = 0.0
    with Engine(config, in_process=True) as engine:
        runner: Runner = manager_of(engine).ports._runner  # type: ignore[attr-defined]
        manager_of(engine).paging.min_shared_entries = 1000  # so that both ways of sharing a prompt's pages are used
        waits = _watch_launches(runner)
        knobs.runtime.jit_post_compile_hook = lambda *_, **about: late.append(str(about.get("repr")))
        graphs, blocks = len(runner.graphs), torch.cuda.memory_stats()["num_device_alloc"]
        for prompts, params in _requests():
            engine.generate(prompts, params)
        blocks = torch.cuda.memory_stats()["num_device_alloc"] - blocks
        return SetUpLate(late, len(runner.graphs) - graphs, blocks, waits)


def _watch_launches(runner: Runner) -> set[str]:
    """Return a set that collects the lines where a launch waits for the device, as far as torch detects it."""
    launch, waits = runner.launch, set[str]()

    def watched(step: StepInput) -> LaunchedStep:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            launched = launch(step)
            torch.cuda.set_sync_debug_mode("default")
        waits.update(f"{one.filename}:{one.lineno}" for one in found if "called a synchronizing" in str(one.message))
        return launched

    runner.launch = watched  # type: ignore[method-assign]
    return waits


def _requests() -> list[tuple[list[list[int]], list[SamplingParams]]]:
    """Return rounds of one, few and many requests, short and long, with every sampling parameter."""
    lengths = (1, 7, 16, 33, 64, 100, 200, 450)
    extras: list[dict[str, object]] = [
        {},
        {"temperature": 0},
        {"top_p": 0.9},
        {"top_k": 5, "min_p": 0.01},
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.1, "frequency_penalty": 0.2},
        {"logit_bias": {7: 2.0, 9: -3.0}},
        {"min_tokens": 4},
        {"logprobs": 0},
        {"logprobs": 20},
        {"prompt_logprobs": 2},
    ]

    def made(count: int, start: int, **more: object) -> list[SamplingParams]:
        chosen = itertools.islice(itertools.cycle(extras), start, start + count)
        return [SamplingParams(max_tokens=24, seed=i, **{**extra, **more}) for i, extra in enumerate(chosen)]  # type: ignore[arg-type]

    rounds = [(random_prompts((length,)), made(1, start)) for start, length in enumerate(lengths)]
    rounds += [(random_prompts(lengths[:few]), made(few, few)) for few in range(2, 8)]
    rounds.append((random_prompts(lengths * 40), made(320, 0)))
    rounds.append((random_prompts((150,) * 2), made(2, 0, n=200)))
    return rounds
