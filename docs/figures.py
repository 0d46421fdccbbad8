"""Draw the figures of the documentation: `uv run python docs/figures.py` writes the SVG files beside this script."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

HERE = Path(__file__).resolve().parent

INK, MUTED, FACE, ACCENT, PEER = "#1f2933", "#52606d", "#f5f7fa", "#2563eb", "#9aa5b1"

# Thousand output tokens per second on one H200, bfloat16; docs/benchmarks.md says how each was measured.
ENGINES = ("tok", "Tokasaurus 0.0.4", "vLLM 0.25.1")
THROUGHPUT: dict[str, tuple[float, float | None, float]] = {
    "16 prompts × 1,024 samples, 1B": (162.3, 84.1, 63.2),
    "8,192 chats, nothing shared, 1B": (74.7, 49.0, 54.1),
    "1,024 sequences of 512 + 256, 1B": (60.3, None, 45.5),
    "1,024 sequences of 512 + 256, 8B": (11.3, None, 10.6),
}


def _save(figure: Figure, name: str) -> None:
    # Without a date and with fixed ids, the same figure is the same file.
    with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(HERE / name, metadata={"Date": None, "Creator": None})
    path = HERE / name
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def _box(
    axes: Axes, x: float, y: float, width: float, height: float, title: str, lines: str = "", *, face: str = FACE
) -> None:
    axes.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=1", facecolor=face, edgecolor=INK)
    )
    top = y + height - 2.4 if lines else y + height / 2
    axes.text(x + width / 2, top, title, ha="center", va="center", color=INK, fontsize=9.5, fontweight="bold")
    if lines:
        axes.text(x + width / 2, (y + top - 1.4) / 2, lines, ha="center", va="center", color=MUTED, fontsize=8)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], label: str, dx: float, dy: float) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=10, color=INK, linewidth=1))
    x, y = (start[0] + end[0]) / 2 + dx, (start[1] + end[1]) / 2 + dy
    axes.text(x, y, label, ha="center", va="center", color=ACCENT, fontsize=8)


def architecture() -> Figure:
    """Processes of an engine with one replica, and the messages between them."""
    figure = Figure(figsize=(9, 3.7))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 41)
    axes.axis("off")
    _box(axes, 1, 15, 12, 11, "clients", "OpenAI SDKs\ntok-client")
    _box(
        axes,
        22,
        8,
        19,
        25,
        "engine process",
        "HTTP, batches\ntokenise, detokenise\ndispatch to replicas\nroute output\nsupervise, restart",
    )
    axes.add_patch(
        FancyBboxPatch(
            (47.5, 3),
            51.5,
            35,
            boxstyle="round,pad=0,rounding_size=1",
            facecolor="none",
            edgecolor=MUTED,
            linestyle="--",
        )
    )
    axes.text(98, 35.6, "replica (one of dp)", ha="right", va="center", color=MUTED, fontsize=8.5)
    _box(
        axes,
        50,
        8,
        19,
        25,
        "manager",
        "admission\nKV pages, prefix tree\nprefix groups\nbatch building\nstops, grammars",
    )
    _box(axes, 82, 20.5, 15, 12.5, "worker 0", "model, sampling\nCUDA graphs")
    _box(axes, 82, 5, 15, 12.5, "worker …", "pp × tp workers")
    _arrow(axes, (13, 22), (22, 22), "HTTP", 0, 1.5)
    _arrow(axes, (22, 18.5), (13, 18.5), "", 0, 0)
    _arrow(axes, (41, 24), (50, 24), "Submit", -1.4, 1.6)
    _arrow(axes, (50, 17), (41, 17), "Progress", -1.4, 1.6)
    _arrow(axes, (69, 29), (82, 29), "StepInput", 0, 1.6)
    _arrow(axes, (82, 24), (69, 24), "StepOutput", 0, 1.6)
    _arrow(axes, (69, 14), (82, 12), "StepInput", 0, 2)
    axes.add_patch(
        FancyArrowPatch((89.5, 20.5), (89.5, 17.5), arrowstyle="<|-|>", mutation_scale=9, color=INK, linewidth=1)
    )
    return figure


def throughput() -> Figure:
    """Output tokens per second beside peers."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axes = figure.add_subplot()
    height = 0.26
    colours = (ACCENT, "#7b8794", "#cbd2d9")
    for place, (engine, colour) in enumerate(zip(ENGINES, colours, strict=True)):
        for row, values in enumerate(THROUGHPUT.values()):
            value = values[place]
            y = row + (place - 1) * height
            label = engine if row == 0 else None
            if value is not None:
                axes.barh(y, value, height * 0.92, color=colour, label=label)
                axes.text(value + 1.2, y, f"{value:.1f}", va="center", fontsize=8, color=INK)
    axes.set_yticks(range(len(THROUGHPUT)), list(THROUGHPUT), fontsize=9, color=INK)
    axes.invert_yaxis()
    axes.set_xlim(0, 180)
    axes.set_xlabel("thousand output tokens per second, one H200, bfloat16", fontsize=9, color=INK)
    axes.tick_params(axis="x", labelsize=8, colors=MUTED)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.legend(loc="lower right", fontsize=9, frameon=False)
    return figure


FIGURES = {"architecture.svg": architecture, "throughput.svg": throughput}


def main() -> None:
    """Write every figure."""
    for name, draw in FIGURES.items():
        _save(draw(), name)


if __name__ == "__main__":
    main()
