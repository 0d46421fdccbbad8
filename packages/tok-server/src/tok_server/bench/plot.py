"""The plot of a benchmark: throughput over the run, and how many sequences ran, as PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from tok_server.bench.result import Result

_LINES, _TEXT, _GRID = ("#1f5fa8", "#c2571a", "#3a8a4d", "#8a4fa3"), "#333333", "#dddddd"


def plot_results(results: Sequence[Result], file: Path) -> None:
    """Writes the plot to `file`, a line for each repetition. Errors: ValueError without results."""
    if not results:
        raise ValueError("results is empty; allowed: at least one")
    figure = Figure(figsize=(8, 5.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for one in results:
        colour = _LINES[one.rep % len(_LINES)]
        label = f"repetition {one.rep}: {one.output_tok_s:,.0f} tokens/s"
        above.plot(one.timeline.seconds, one.timeline.output_tok_s, color=colour, linewidth=1.6, label=label)
        below.plot(one.timeline.seconds, one.timeline.sequences_running, color=colour, linewidth=1.6)
    first = results[0]
    above.set_title(f"{first.workload} on {first.model} ({first.engine}, {first.mode})", fontsize=10, color=_TEXT)
    above.legend(loc="lower center", frameon=False)
    _style(above, "output tokens per second")
    _style(below, "sequences running")
    below.set_xlabel("seconds")
    below.set_xlim(0, max(one.seconds for one in results))
    figure.savefig(file, format="png")


def _style(axes: Axes, label: str) -> None:
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.grid(color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
