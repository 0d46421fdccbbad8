"""Plot a benchmark as PNG: throughput and running sequences over time, and histograms of request times."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, PercentFormatter, StrMethodFormatter

from tok_server.bench.workloads.histogram import Histogram
from tok_server.bench.workloads.result import Result

_LINES, _TEXT, _GRID = ("#1f5fa8", "#c2571a", "#3a8a4d", "#8a4fa3"), "#333333", "#dddddd"
TIMES = {"request": "whole request", "first_token": "first token", "per_token": "each token after it"}
FIGURE_WIDTH, RUN_HEIGHT, BUSY_HEIGHT, TIMES_HEIGHT = 8, 5.5, 1.0, 2.4  # inches: figure width, then heights


def plot_results(results: Sequence[Result], file: Path) -> None:
    """Write the plot to `file`, with a line for each repetition. Errors: ValueError without results."""
    if not results:
        raise ValueError("results is empty; allowed: at least one")
    times = {name: found for name in TIMES if any(found := [_histogram(result, name) for result in results])}
    height = RUN_HEIGHT + BUSY_HEIGHT * any(result.timeline.device_busy is not None for result in results)
    figure = Figure(figsize=(FIGURE_WIDTH, height + TIMES_HEIGHT * bool(times)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    if times:
        above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=(height, TIMES_HEIGHT))[:, 0]
        _plot_run(above, results)
        _plot_times(below, results, times)
    else:
        _plot_run(figure, results)
    figure.savefig(file, format="png")


def _plot_run(figure: Figure | SubFigure, results: Sequence[Result]) -> None:
    known = any(result.timeline.device_busy is not None for result in results)
    rate, running, *busy = figure.subplots(2 + known, 1, sharex=True, height_ratios=(3, 2, 1.2)[: 2 + known])
    for result in results:
        line = {"color": _colour(result), "linewidth": 1.6}
        at = result.timeline.seconds
        rate.plot(at, result.timeline.output_tok_s, label=_label(result), **line)
        running.plot(at, result.timeline.sequences_running, **line)
        if busy and result.timeline.device_busy is not None:
            busy[0].plot(at, result.timeline.device_busy, **line)
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
    last.set_xlim(0, max(result.seconds for result in results))


def _plot_times(
    figure: Figure | SubFigure, results: Sequence[Result], times: dict[str, list[Histogram | None]]
) -> None:
    """Plot a histogram for each kind of time, with dashed lines at p50 and p99."""
    for axes, (name, found) in zip(figure.subplots(1, len(times), squeeze=False)[0], times.items(), strict=True):
        for result, shown in zip(results, found, strict=True):
            if shown is None:
                continue
            axes.stairs(shown.counts, shown.edges, color=_colour(result), linewidth=1.4, fill=False)
            axes.stairs(shown.counts, shown.edges, color=_colour(result), alpha=0.15, fill=True)
            for at in _percentiles(result, name):
                axes.axvline(at, color=_colour(result), linewidth=1, linestyle=(0, (4, 3)))
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(10, (1.0, 2.0, 5.0), numticks=6))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(_time))
        axes.set_title(f"{TIMES[name]} (p50, p99 dashed)", fontsize=9, color=_TEXT)
        _style(axes, "requests" if name == next(iter(times)) else "")


def _histogram(result: Result, name: str) -> Histogram | None:
    found: Histogram | None = getattr(result.histograms, name, None)
    return found


def _percentiles(result: Result, name: str) -> list[float]:
    """Return p50 and p99 in seconds, without unknown ones."""
    found = {
        "request": (result.latency_p50_s, result.latency_p99_s),
        "first_token": (result.ttft_p50_s, result.ttft_p99_s),
        "per_token": (_ms_to_seconds(result.per_token_p50_ms), _ms_to_seconds(result.per_token_p99_ms)),
    }[name]
    return [at for at in found if at is not None]


def _ms_to_seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _time(seconds: float, _: int = 0) -> str:
    return f"{seconds * 1e3:g} ms" if seconds < 1 else f"{seconds:g} s"


def _colour(result: Result) -> str:
    return _LINES[result.rep % len(_LINES)]


def _label(result: Result) -> str:
    label = f"repetition {result.rep}: {result.output_tok_s:,.0f} tokens/s"
    return label if result.gpu_busy_share is None else f"{label}, device busy {result.gpu_busy_share:.1%}"


def _style(axes: Axes, label: str) -> None:
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.grid(color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
