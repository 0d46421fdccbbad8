"""`tok bench offline` and `tok bench serve`: run a workload and print a table or JSON, with optional plot and trace."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import math
import sys
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from tok_core import EngineConfig, InvalidField, SamplingParams
from tok_core.config import TRACE_STEPS
from tok_core.runtime import trace_file
from tok_server.bench.workloads.result import Result, table
from tok_server.bench.workloads.workload import Workload, read_workload
from tok_server.flags import engine_config, model_and_name


def main(options: argparse.Namespace) -> int:
    """Measure and print the results. Returns 1 if requests failed. Errors: InvalidField, TokError."""
    _check(options)
    workload = _workload(options)
    results = _offline(options, workload) if options.kind == "offline" else asyncio.run(_serve(options, workload))
    if not options.json:
        print(table(results))
    if options.plot is not None:
        from tok_server.bench.workloads.plot import plot_results

        plot_results(results, options.plot)
    if options.kind == "offline" and options.trace is not None:
        _trace(options, workload, results[0])
    return 1 if any(one.errors for one in results) else 0


def _check(options: argparse.Namespace) -> None:
    for field in ("limit", "n", "max_tokens", "reps", "concurrency", "trace_steps"):
        count: int | None = getattr(options, field, None)
        if count is not None and count < 1:
            raise InvalidField(field, count, "integers from 1")
    if options.kind == "offline" and options.trace_steps is not None and options.trace is None:
        raise InvalidField("trace_steps", options.trace_steps, "only together with --trace")
    for field, low in (("wait", "from 0"), ("timeout", "above 0")):
        value = float(getattr(options, field, 1.0))
        if not math.isfinite(value) or value < 0 or (field == "timeout" and value == 0):
            raise InvalidField(field, value, f"seconds {low}")
    if options.kind == "serve":
        parts = urlsplit(options.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise InvalidField("url", options.url, "URLs that begin with http:// or https://")
    for field in ("plot", "trace"):
        file: Path | None = getattr(options, field, None)
        if file is not None and not file.parent.is_dir():
            raise InvalidField(field, str(file), "a file in a directory that exists")


def _workload(options: argparse.Namespace) -> Workload:
    workload = read_workload(
        options.workload, options.workload_dir, limit=options.limit, n=options.n, max_tokens=options.max_tokens
    )
    overrides = {name: getattr(options, name) for name in ("temperature", "top_p")}
    workload = dataclasses.replace(workload, **{name: value for name, value in overrides.items() if value is not None})
    SamplingParams(temperature=workload.temperature, top_p=workload.top_p)  # raises InvalidField
    return workload


def _offline(options: argparse.Namespace, workload: Workload) -> list[Result]:
    from tok_server.bench.workloads.offline import run_offline

    config, (_, name) = _config(options, workload), model_and_name(options.model)
    results = []
    for result in run_offline(
        config, name, workload, reps=options.reps, keep_engine=options.keep_engine, text=options.text
    ):
        results.append(result)
        _print_json(options, result)
    return results


def _trace(options: argparse.Namespace, workload: Workload, measured: Result) -> None:
    """Trace one more run and print a summary of each worker's trace. Errors: InvalidField, TokError."""
    from tok_server.bench.busy import describe
    from tok_server.bench.workloads.offline import trace_offline

    assert measured.steps is not None
    config, steps = _config(options, workload), options.trace_steps or TRACE_STEPS
    device_times = trace_offline(
        config, workload, options.trace, steps=steps, total_steps=measured.steps, text=options.text
    )
    for coordinates, one in device_times.items():
        head = f"stage {coordinates.stage}, rank {coordinates.rank}: " if len(device_times) > 1 else ""
        line = f"{head}{steps} steps traced in {trace_file(options.trace, coordinates)}, {describe(one)}"
        print(line, file=sys.stderr if options.json else sys.stdout)


def _config(options: argparse.Namespace, workload: Workload) -> EngineConfig:
    # A workload defines all sampling parameters; the model's generation_config.json must not change them.
    config = msgspec.structs.replace(engine_config(options), generation_config="none")
    if config.max_model_len is None:
        config = msgspec.structs.replace(config, max_model_len=workload.max_sequence_tokens)
    if options.eos_probability is None and options.markov_probability is None:
        return config
    if workload.temperature == 0:
        flag = "--eos-probability" if options.markov_probability is None else "--markov-probability"
        raise InvalidField("temperature", workload.temperature, f"above 0 with {flag}")
    return msgspec.structs.replace(config, eos_temperature=workload.temperature)


async def _serve(options: argparse.Namespace, workload: Workload) -> list[Result]:
    from tok_server.bench.workloads.serve import ServerTarget, run_serve

    target = ServerTarget(
        url=options.url,
        model=options.model,
        api_key=options.api_key,
        engine=options.label,
        concurrency=options.concurrency,
        stream=options.stream,
        reset_path=options.reset_path,
        wait=options.wait,
        timeout=options.timeout,
    )
    results = []
    async for result in run_serve(target, workload, options.reps):
        results.append(result)
        _print_json(options, result)
    return results


def _print_json(options: argparse.Namespace, result: Result) -> None:
    if options.json:
        print(msgspec.json.encode(result).decode(), flush=True)
