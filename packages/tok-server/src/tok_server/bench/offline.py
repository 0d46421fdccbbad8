"""A workload through `Engine`: all requests at once, token ids in and out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import msgspec
import numpy as np

from tok_core import Engine, EngineConfig, RequestOutput, SamplingParams
from tok_server.bench.bare import without_tokenizer
from tok_server.bench.gpu import GpuMemory, first_gpu
from tok_server.bench.result import Result, percentile, ratio
from tok_server.bench.timeline import timeline
from tok_server.bench.watch import progress_bar, watching
from tok_server.bench.workload import Request, Workload, backwards

LOOK_EVERY = 0.05
WARM_UP_TOKENS = 16
SETTLE_SECONDS = 10.0

Counters = dict[str, float]


def run_offline(
    config: EngineConfig, name: str, workload: Workload, *, reps: int, keep_engine: bool, text: bool
) -> Iterator[Result]:
    """One result a repetition, each on an engine of its own that has been warmed up.

    name         of the model
    keep_engine  one engine for all repetitions: later ones find the earlier ones' tokens in the prefix cache
    text         makes texts of the tokens, too

    Errors: those of the engine.
    """
    view: AbstractContextManager[str] = nullcontext(config.model)
    if not text:
        view = without_tokenizer(config.model, config.data_dir)
    with view as model:
        config = msgspec.structs.replace(config, model=model)
        for first in range(0, reps, reps if keep_engine else 1):
            yield from _on_one_engine(config, name, workload, range(first, reps if keep_engine else first + 1))


def _on_one_engine(config: EngineConfig, name: str, workload: Workload, reps: range) -> Iterator[Result]:
    began = time.monotonic()
    with Engine(config) as engine:
        started = time.monotonic() - began
        warm_up(engine, workload)
        for rep in reps:
            result = measure(engine, name, workload, rep)
            yield msgspec.structs.replace(result, startup_s=round(started, 2), prefix_groups=config.prefix_groups)


def warm_up(engine: Engine, workload: Workload) -> None:
    """As many sequences as run at once, a few tokens each."""
    requests = backwards(workload.requests, engine.info.max_running, WARM_UP_TOKENS)
    engine.generate([one.ids for one in requests], _params(requests, workload))


def measure(engine: Engine, name: str, workload: Workload, rep: int) -> Result:
    """One repetition on an engine that has nothing else to do. Errors: those of the engine."""
    before = settled(engine)
    samples: list[tuple[float, float, float]] = []
    outputs: list[RequestOutput] = []
    gpu = first_gpu() if engine.info.device.startswith("cuda") else None
    prompts, params = [one.ids for one in workload.requests], _params(workload.requests, workload)
    with progress_bar(f"{workload.name} {rep}", len(prompts)) as show:
        began = time.monotonic()

        def look() -> None:
            stats = engine.stats()
            tokens, running = stats["output_tokens"] - before["output_tokens"], stats["sequences_running"]
            samples.append((time.monotonic() - began, tokens, running))
            show(len(outputs), int(tokens), int(running))
            if gpu is not None:
                gpu.sample()

        with watching(look, LOOK_EVERY):
            outputs.extend(output for _, output in engine.stream(prompts, params))
            seconds = time.monotonic() - began
    return _result(engine, name, workload, rep, outputs, seconds, samples, since(before, settled(engine)), gpu)


def settled(engine: Engine) -> Counters:
    """The engine's counters once the steps that were queued behind the last token are back, too."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while engine.stats()["steps_in_flight"] and time.monotonic() < deadline:
        time.sleep(0.005)
    return engine.stats()


def since(before: Counters, after: Counters) -> Callable[[str], int]:
    """How much a counter has grown."""
    return lambda name: int(after[name] - before[name])


def _params(requests: list[Request], workload: Workload) -> list[SamplingParams]:
    return [
        SamplingParams(
            n=one.n,
            max_tokens=one.max_tokens,
            temperature=workload.temperature,
            top_p=workload.top_p,
            ignore_eos=one.ignore_eos,
            seed=index,
        )
        for index, one in enumerate(requests)
    ]


def _result(
    engine: Engine,
    name: str,
    workload: Workload,
    rep: int,
    outputs: list[RequestOutput],
    seconds: float,
    samples: list[tuple[float, float, float]],
    grown: Callable[[str], int],
    gpu: GpuMemory | None,
) -> Result:
    completions = [one for output in outputs for one in output.outputs]
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    output_tokens = sum(len(one.token_ids) for one in completions)
    ttft, latency, per_token = _times(outputs)
    info = engine.info
    computed = grown("output_tokens") + grown("discarded_tokens")
    return Result(
        engine="tok",
        mode="offline",
        workload=workload.name,
        rep=rep,
        prompts=len(outputs),
        sequences=len(completions),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        seconds=round(seconds, 3),
        output_tok_s=round(output_tokens / seconds, 1),
        total_tok_s=round((prompt_tokens + output_tokens) / seconds, 1),
        mean_out=round(ratio(output_tokens, len(completions)), 2),
        finished_by_stop=sum(one.finish_reason == "stop" for one in completions),
        errors=sum(one.finish_reason == "abort" for one in completions),
        gpu=None if gpu is None else gpu.name,
        peak_gpu_mem_gib=None if gpu is None else round(gpu.peak / 2**30, 2),
        latency_p50_s=percentile(latency, 0.5),
        latency_p99_s=percentile(latency, 0.99),
        concurrency=info.max_running,
        model=name,
        ttft_p50_s=percentile(ttft, 0.5),
        ttft_p99_s=percentile(ttft, 0.99),
        per_token_p50_ms=percentile(per_token, 0.5, 1e3),
        per_token_p99_ms=percentile(per_token, 0.99, 1e3),
        prefix_hit_share=round(ratio(sum(output.cached_tokens for output in outputs), prompt_tokens), 4),
        group_rows_share=round(ratio(grown("group_rows"), computed), 4),
        preemptions=grown("preemptions"),
        discarded_tokens=grown("discarded_tokens"),
        steps=grown("steps"),
        device=info.device,
        dtype=info.dtype,
        backend=info.backend,
        kv_cache_tokens=info.kv_cache_tokens,
        max_step_tokens=info.max_step_tokens,
        timeline=timeline(np.array(samples), seconds),
    )


def _times(outputs: list[RequestOutput]) -> tuple[list[float], list[float], list[float]]:
    """Of each request: to its first token, to its end, and per token of its longest sample."""
    ttft, latency, per_token = [], [], []
    for output in outputs:
        times = output.timings
        assert times.first_token is not None
        assert times.finished is not None
        ttft.append(times.first_token - times.submitted)
        latency.append(times.finished - times.submitted)
        longest = max(len(one.token_ids) for one in output.outputs)
        if longest > 1:
            per_token.append((times.finished - times.first_token) / (longest - 1))
    return ttft, latency, per_token
