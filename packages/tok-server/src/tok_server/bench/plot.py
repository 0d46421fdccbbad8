"""The plot of a benchmark: throughput over the run, and how many sequences ran, as PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter, StrMethodFormatter

from tok_server.bench.result import Result

_LINES, _TEXT, _GRID = ("#1f5fa8", "#c2571a", "#3a8a4d", "#8a4fa3"), "#333333", "#dddddd"


def plot_results(results: Sequence[Result], file: Path) -> None:
    """Writes the plot to `file`, a line for each repetition. Errors: ValueError without results."""
    if not results:
        raise ValueError("results is empty; allowed: at least one")
    known = any(one.timeline.device_busy is not None for one in results)
    figure = Figure(figsize=(8, 6.5 if known else 5.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    rate, running, *busy = figure.subplots(2 + known, 1, sharex=True, height_ratios=(3, 2, 1.2)[: 2 + known])
    for one in results:
        line = {"color": _LINES[one.rep % len(_LINES)], "linewidth": 1.6}
        at = one.timeline.seconds
        rate.plot(at, one.timeline.output_tok_s, label=_label(one), **line)
        running.plot(at, one.timeline.sequences_running, **line)
        if busy and one.timeline.device_busy is not None:
            busy[0].plot(at, one.timeline.device_busy, **line)
    first = results[0]
    rate.set_title(f"{first.workload} on {first.model} ({first.engine}, {first.mode})", fontsize=10, color=_TEXT)
    rate.legend(loc="lower center", frameon=False)
    _style(rate, "output tokens per second")
    _style(running, "sequences running")
    for axes in busy:
        _style(axes, "device busy")
        axes.set_ylim(0, 1.05)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    last = busy[0] if busy else running
    last.set_xlabel("seconds")
    last.set_xlim(0, max(one.seconds for one in results))
    figure.savefig(file, format="png")


def _label(one: Result) -> str:
    label = f"repetition {one.rep}: {one.output_tok_s:,.0f} tokens/s"
    return label if one.gpu_busy_share is None else f"{label}, device busy {one.gpu_busy_share:.1%}"


def _style(axes: Axes, label: str) -> None:
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.grid(color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
