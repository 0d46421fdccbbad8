"""Add the growth of the engine's own counters during a run to its Result."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from tok_server.bench.workloads.result import Result, ratio

Counters = Mapping[str, float]

REQUIRED_COUNTERS = (
    "steps",
    "preemptions",
    "discarded_tokens",
    "output_tokens",
    "group_rows",
    "schedule_seconds",
    "launch_seconds",
    "device_seconds",
    "output_seconds",
)
"""Names of the required counters."""
DRAFT_COUNTERS = ("draft_steps", "drafted_tokens", "accepted_tokens")
MODEL_DRAFT_COUNTERS = ("model_drafted_tokens", "model_accepted_tokens")


def counter_growth(before: Counters, after: Counters) -> Callable[[str], float]:
    """Return a function that gives a counter's growth."""
    return lambda name: after[name] - before[name]


def with_counters(result: Result, before: Counters, after: Counters) -> Result:
    """Return `result` with the figures derived from the counters before and after the run."""
    growth, steps = counter_growth(before, after), after["steps"] - before["steps"]
    rejected = growth("drafted_tokens") - growth("accepted_tokens") if after.get("draft_steps") else 0.0
    sampled = growth("output_tokens") + growth("discarded_tokens") + rejected
    replica_seconds = result.seconds * after.get("replicas", 1)

    def mean_ms(part: str) -> float:
        return round(ratio(growth(f"{part}_seconds"), steps) * 1e3, 3)

    return msgspec.structs.replace(
        result,
        group_rows_share=round(ratio(growth("group_rows"), sampled), 4),
        preemptions=int(growth("preemptions")),
        discarded_tokens=int(growth("discarded_tokens")),
        **{name: int(growth(name)) for name in DRAFT_COUNTERS if after.get("draft_steps")},
        **{name: int(growth(name)) for name in MODEL_DRAFT_COUNTERS if after.get("model_drafted_tokens")},
        computed_tokens=int(growth("computed_tokens")) if "computed_tokens" in after else None,  # not in /metrics
        steps=int(steps),
        # Capped at 1: the counters include steps queued behind the last token, which run after the measured time.
        gpu_busy_share=round(min(ratio(growth("device_seconds"), replica_seconds), 1.0), 4),
        schedule_ms=mean_ms("schedule"),
        launch_ms=mean_ms("launch"),
        device_ms=mean_ms("device"),
        output_ms=mean_ms("output"),
    )
