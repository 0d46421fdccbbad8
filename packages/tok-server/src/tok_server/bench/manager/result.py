"""The result of `tok bench manager`: CPU time of the manager under one workload, as a flat record."""

from __future__ import annotations

import msgspec

from tok_server.bench.manager.profiler import PARTS


class ManagerResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """CPU time of the manager alone, without its worker; medians over blocks of steps.

    us_per_token             µs for each generated token that is reported to the engine; None for `admission`
    ms_per_step              ms per step of all parts together, measured without the profiler
    the parts                ms per step each: `ms_per_step`, divided in the proportions measured with the profiler
    *_bytes                  bytes of messages per step: to the worker, back from it, and to the engine
    running                  running sequences, on average
    us_per_request, seconds  for `admission` only: CPU time until all requests have started
    """

    engine: str
    workload: str
    sequences: int
    us_per_token: float | None = None
    ms_per_step: float
    schedule: float
    pages: float
    forecast: float
    groups: float
    messages: float
    outputs: float
    stops: float
    rest: float
    input_bytes: int
    output_bytes: int
    progress_bytes: int
    running: int
    steps: int
    discarded_share: float
    stop: str | None = None
    step_time_ms: float | None = None
    us_per_request: float | None = None
    seconds: float | None = None


def table(result: ManagerResult) -> str:
    """Return the result as text."""
    stop = "" if result.stop is None else f", stop {result.stop!r}"
    lines = [
        f"{result.workload}, {result.sequences:,} sequences{stop}: {result.steps:,} steps, {result.running:,} running"
    ]
    for label, value in (
        ("CPU per token, µs", result.us_per_token),
        ("CPU per request, µs", result.us_per_request),
        ("CPU until all started, s", result.seconds),
        ("CPU per step, ms", result.ms_per_step),
    ):
        if value is not None:
            lines.append(f"  {label:<26}{value:>12,.3f}")
    parts = {name: float(getattr(result, name)) for name in PARTS}
    whole = sum(parts.values()) or 1.0
    lines += [f"    {name:<24}{ms:>12,.3f}{ms / whole:>8.1%}" for name, ms in parts.items()]
    for label, count in (
        ("bytes to the worker", result.input_bytes),
        ("bytes from the worker", result.output_bytes),
        ("bytes to the engine", result.progress_bytes),
    ):
        lines.append(f"  {label:<26}{count:>12,d}")
    lines.append(f"  {'discarded tokens':<26}{result.discarded_share:>12.2%}")
    return "\n".join(lines)
