"""Result: what one repetition of a workload has shown, in one flat line."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tok_server.bench.workloads.histogram import Histograms


class Timeline(msgspec.Struct, frozen=True):
    """Equal spans of the run, in columns: their middles in seconds, output tokens per second, sequences running.

    device_busy     the share of each in which the device worked
    computed_tok_s  tokens computed per second: of prompts, but those found in the prefix cache, and of outputs. Counted
                    when their steps are scheduled, which is some steps before the device is at them

    None: not known here.
    """

    seconds: list[float]
    output_tok_s: list[float]
    sequences_running: list[float]
    device_busy: list[float] | None = None
    computed_tok_s: list[float] | None = None


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One repetition. Token counts of prompts count each prompt once; None: not known here.

    seconds            from the first submission to the last completion
    latency_*          of whole requests, from submission to the last token of the last sample
    ttft_*             from submission to the first token of any sample
    per_token_*        of a request: from its first token to its last, over the tokens of its longest sample but one
    prefix_hit_share   of prompt tokens, those found in the prefix cache
    group_rows_share   of tokens computed for an output, those that read a shared prefix as one of a group
    discarded_tokens   computed past the end of a sample, and thrown away
    computed_tokens    of prompts, but those found in the prefix cache, and of outputs, discarded ones among them; each
                       as often as it was computed
    gpu_busy_share     of the run, the share in which the device was between a step's first operation and its last
    *_ms               of a step, on average: to schedule it, to launch it, on the device, to take in what came of it
    startup_s          from the engine's construction until it was ready
    tp_few_tokens      with tp above 1: tokens of a step up to which ranks keep the whole residual stream
    tp_async_tokens    tokens of a step from which on they overlap products with collectives; None: never
    """

    engine: str
    mode: str
    workload: str
    rep: int
    prompts: int
    sequences: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    output_tok_s: float
    total_tok_s: float
    mean_out: float
    finished_by_stop: int
    errors: int
    gpu: str | None
    peak_gpu_mem_gib: float | None
    latency_p50_s: float | None
    latency_p99_s: float | None
    concurrency: int
    model: str
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    per_token_p50_ms: float | None
    per_token_p99_ms: float | None
    prefix_hit_share: float | None
    group_rows_share: float | None = None
    preemptions: int | None = None
    discarded_tokens: int | None = None
    computed_tokens: int | None = None
    steps: int | None = None
    gpu_busy_share: float | None = None
    schedule_ms: float | None = None
    launch_ms: float | None = None
    device_ms: float | None = None
    output_ms: float | None = None
    startup_s: float | None = None
    device: str | None = None
    dtype: str | None = None
    backend: str | None = None
    kv_cache_tokens: int | None = None
    max_step_tokens: int | None = None
    tp_few_tokens: int | None = None
    tp_async_tokens: int | None = None
    prefix_groups: bool | None = None
    first_error: str | None = None
    timeline: Timeline
    histograms: Histograms | None = None


def percentile(values: Sequence[float], share: float, scale: float = 1.0) -> float | None:
    """The value below which `share` of `values` lie, times `scale`; None of none.

    >>> percentile([3.0, 1.0, 2.0], 0.5), percentile([], 0.5)
    (2.0, None)
    """
    if not values:
        return None
    place = min(int(len(values) * share), len(values) - 1)
    return round(sorted(values)[place] * scale, 4)


def ratio(part: float, whole: float) -> float:
    """`part / whole`; 0 where there is nothing."""
    return part / whole if whole else 0.0


ROWS: tuple[tuple[str, str, str], ...] = (
    ("output tokens/s", "output_tok_s", ",.0f"),
    ("total tokens/s", "total_tok_s", ",.0f"),
    ("seconds", "seconds", ",.2f"),
    ("requests", "prompts", ",d"),
    ("sequences", "sequences", ",d"),
    ("prompt tokens", "prompt_tokens", ",d"),
    ("output tokens", "output_tokens", ",d"),
    ("tokens a sequence", "mean_out", ",.1f"),
    ("finished by stop", "finished_by_stop", ",d"),
    ("errors", "errors", ",d"),
    ("request latency p50, s", "latency_p50_s", ",.3f"),
    ("request latency p99, s", "latency_p99_s", ",.3f"),
    ("first token p50, s", "ttft_p50_s", ",.3f"),
    ("first token p99, s", "ttft_p99_s", ",.3f"),
    ("per token p50, ms", "per_token_p50_ms", ",.2f"),
    ("per token p99, ms", "per_token_p99_ms", ",.2f"),
    ("prefix hits", "prefix_hit_share", ".1%"),
    ("rows in prefix groups", "group_rows_share", ".1%"),
    ("steps", "steps", ",d"),
    ("device busy", "gpu_busy_share", ".1%"),
    ("schedule a step, ms", "schedule_ms", ",.3f"),
    ("launch a step, ms", "launch_ms", ",.3f"),
    ("step on the device, ms", "device_ms", ",.3f"),
    ("output of a step, ms", "output_ms", ",.3f"),
    ("preemptions", "preemptions", ",d"),
    ("discarded tokens", "discarded_tokens", ",d"),
    ("peak GPU memory, GiB", "peak_gpu_mem_gib", ",.1f"),
    ("start-up, s", "startup_s", ",.1f"),
)


def table(results: Sequence[Result]) -> str:
    """The results as text, a column for each repetition; rows of which nothing is known are left out."""
    first = results[0]
    lines = [f"{first.workload} on {first.model}, {first.mode}, {first.engine}"]
    for label, field, form in ROWS:
        values = [getattr(one, field) for one in results]
        if any(value is not None for value in values):
            cells = ("–" if value is None else format(value, form) for value in values)
            lines.append(f"  {label:<24}" + "".join(f"{cell:>14}" for cell in cells))
    return "\n".join(lines)
