"""The result of one repetition of a workload, as a flat record."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tok_server.bench.workloads.histogram import Histograms


class Timeline(msgspec.Struct, frozen=True):
    """Equal spans of the run, as columns: their middles in seconds, output tokens per second, sequences running.

    device_busy     share of each span in which the device computed
    computed_tok_s  computed tokens per second: outputs, and prompt tokens not found in the prefix cache. A token counts
                    when its step is scheduled, which is some steps before the device computes it

    None: unknown in this mode.
    """

    seconds: list[float]
    output_tok_s: list[float]
    sequences_running: list[float]
    device_busy: list[float] | None = None
    computed_tok_s: list[float] | None = None


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one repetition. Prompt tokens count once per prompt; None: unknown in this mode.

    seconds           from the first submission to the last completion
    latency_*         of whole requests, from submission to the last token of the last sample
    ttft_*            from submission to the first token of any sample
    per_token_*       time from a request's first token to its last, divided by the tokens of its longest sample minus
                      one
    prefix_hit_share  share of the prompt tokens that were found in the prefix cache
    group_rows_share  share of the sampled tokens, discarded and rejected ones included, whose rows read the pages of a
                      shared prefix as a group
    discarded_tokens  tokens computed past the end of a sample and thrown away
    drafted_tokens    rows that --speculate added to steps, one for each drafted token
    accepted_tokens   drafted tokens that were accepted; each saves its sample one step
    draft_steps       steps that verified drafts
    model_drafted_tokens   tokens drafted by the model of --draft
    model_accepted_tokens  those of them that were accepted
    tail_tok_s        output tokens per second after three quarters of the samples have ended
    computed_tokens   outputs, including discarded tokens, and prompt tokens not found in the prefix cache; a token that
                      is computed repeatedly counts each time
    gpu_busy_share    share of the run in which the device was between a step's first operation and its last
    *_ms              mean time per step: to schedule it, to launch it, on the device, to process its output
    startup_s         from the engine's construction until it was ready
    linear_layers     weight formats of the linear layers
    tp_few_tokens     with tp above 1: largest step, in tokens, that keeps the whole residual stream on every rank
    tp_async_tokens   with tp above 1: smallest step, in tokens, that overlaps GEMMs with collectives; None: no step
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
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None
    draft_steps: int | None = None
    model_drafted_tokens: int | None = None
    model_accepted_tokens: int | None = None
    tail_tok_s: float | None = None
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
    linear_layers: str | None = None
    backend: str | None = None
    kv_cache_tokens: int | None = None
    max_step_tokens: int | None = None
    tp_few_tokens: int | None = None
    tp_async_tokens: int | None = None
    prefix_groups: bool | None = None
    first_error: str | None = None
    timeline: Timeline
    histograms: Histograms | None = None


def percentile(values: Sequence[float], quantile: float, scale: float = 1.0) -> float | None:
    """Return the value below which `quantile` of `values` lie, times `scale`; None if there are no values.

    >>> percentile([3.0, 1.0, 2.0], 0.5), percentile([], 0.5)
    (2.0, None)
    """
    if not values:
        return None
    index = min(int(len(values) * quantile), len(values) - 1)
    return round(sorted(values)[index] * scale, 4)


def ratio(part: float, whole: float) -> float:
    """Return `part / whole`; 0 if `whole` is 0."""
    return part / whole if whole else 0.0


ROWS: tuple[tuple[str, str, str], ...] = (
    ("output tokens/s", "output_tok_s", ",.0f"),
    ("total tokens/s", "total_tok_s", ",.0f"),
    ("tail, output tokens/s", "tail_tok_s", ",.0f"),
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
    ("rows in groups", "group_rows_share", ".1%"),
    ("steps", "steps", ",d"),
    ("steps with drafts", "draft_steps", ",d"),
    ("drafted tokens", "drafted_tokens", ",d"),
    ("accepted (steps saved)", "accepted_tokens", ",d"),
    ("drafted by the draft model", "model_drafted_tokens", ",d"),
    ("accepted of these", "model_accepted_tokens", ",d"),
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
    """Return the results as text, one column per repetition, without rows that are unknown in all repetitions."""
    first = results[0]
    lines = [f"{first.workload} on {first.model}, {first.mode}, {first.engine}"]
    for label, field, number_format in ROWS:
        values = [getattr(result, field) for result in results]
        if any(value is not None for value in values):
            cells = ("–" if value is None else format(value, number_format) for value in values)
            lines.append(f"  {label:<24}" + "".join(f"{cell:>14}" for cell in cells))
    return "\n".join(lines)
