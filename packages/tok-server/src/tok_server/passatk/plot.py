"""Plot coverage as PNG: pass@k over k, with its confidence band."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, PercentFormatter

from tok_server.passatk.estimator import Coverage

_LINE, _TEXT, _GRID = "#1f5fa8", "#333333", "#dddddd"


def plot_coverage(rows: Sequence[Coverage], title: str, file: Path, marked: Sequence[int] = ()) -> None:
    """Write the plot to `file`. `rows` are in order of k; rows whose k is in `marked` get a dot and a figure.

    Errors: ValueError without rows.
    """
    if not rows:
        raise ValueError("rows is empty; allowed: at least one")
    figure = Figure(figsize=(7, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    ks = [row.k for row in rows]
    low, high = [row.low for row in rows], [row.high for row in rows]
    axes.fill_between(ks, low, high, color=_LINE, alpha=0.18, linewidth=0, label="95 % confidence")
    axes.plot(ks, [row.mean for row in rows], color=_LINE, linewidth=2, label="pass@k")
    dots = [row for row in rows if row.k in marked]
    axes.plot([row.k for row in dots], [row.mean for row in dots], "o", color=_LINE, markersize=5)
    for row in dots:
        axes.annotate(
            f"{row.mean:.1%}", (row.k, row.mean), (0, -15), textcoords="offset points", ha="center", fontsize=8,
            color=_TEXT,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xticks(sorted({1, ks[-1], *marked} & set(ks)), [str(k) for k in sorted({1, ks[-1], *marked} & set(ks))])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(ks[0] * 0.9, max(ks[-1], 2) * 1.12)
    axes.set_ylim(min(0.95, max(0.0, min(low) - 0.1)), 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("samples of each problem (k)")
    axes.set_ylabel("problems solved by at least one")
    axes.set_title(title, fontsize=10, color=_TEXT)
    axes.grid(color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(file, format="png")
