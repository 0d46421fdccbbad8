"""`tok kernels`: show which kernels compute a model's attention on this machine, and the times that decided it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from tok_server.flags import SIZES, engine_config

if TYPE_CHECKING:
    from tok_core.worker import PhaseReport


def main(options: argparse.Namespace) -> int:
    """Print the chosen kernels, measuring them unless the result is cached. Errors: InvalidField, TokError."""
    from tok_core.worker.startup.kernel_report import report_attention

    sizes = {name: getattr(options, name) for name in SIZES if getattr(options, name) is not None}
    show(report_attention(engine_config(options), sizes, remeasure=options.measure), Console())
    return 0


def show(report: PhaseReport, console: Console) -> None:
    """Print the report."""
    shape = report.shape.as_json()
    device_name = f"{report.device}, rank 0 of {report.tp}" if report.tp > 1 else report.device
    console.print(f"{device_name}: " + ", ".join(f"{name} {value}" for name, value in shape.items()), highlight=False)
    for phase, kernel in report.fastest.items():
        console.print(f"  {phase:<8} {kernel}", highlight=False)
    if report.measured:
        console.print(_table(report))
        origin = "cached in" if report.cached else "measured now, stored in"
        console.print(f"{origin} {report.directory}", highlight=False, soft_wrap=True)
    for name, reason in report.rejected.items():
        console.print(f"unavailable: {name}: {reason}", markup=False, highlight=False, soft_wrap=True)
    for launch in report.launches:
        console.print(f"tuned launch for {launch}", markup=False, highlight=False, soft_wrap=True)


def _table(report: PhaseReport) -> Table:
    caption = (
        "milliseconds per layer; steps: sequences × tokens; a kernel after the first is chosen only if it is 5 % faster"
    )
    table = Table("phase", "step", "kernel", caption=caption)
    for heading in ("device", "launch", "plan a step", "cost"):
        table.add_column(heading, justify="right")
    # The sort is stable: kernels stay in their order within a step.
    for one in sorted(report.measured, key=lambda one: (one.phase, one.step)):
        times = (one.timing.device_ms, one.timing.host_ms, one.timing.plan_ms, one.cost_ms)
        chosen = report.fastest[one.phase] == one.candidate
        table.add_row(
            *(one.phase, one.step, one.candidate), *(f"{time:.3f}" for time in times), style="bold" if chosen else None
        )
    return table
