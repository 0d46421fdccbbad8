"""`tok quantize`: write a copy of a model with quantised linear layers."""

from __future__ import annotations

import argparse
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tok_core.errors import ModelError
from tok_core.model_config import resolve
from tok_server.commands.models import stored_tensors


def main(options: argparse.Namespace) -> int:
    """Write the quantised model, and print the relative errors of its matrices. Errors: InvalidField, ModelError."""
    from tok_core.models.weights import quantize_checkpoint

    source, out = resolve(options.model, options.data_dir), Path(options.out).expanduser()
    errors: dict[str, list[tuple[float, str]]] = {}
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    bar = Progress(*columns, console=console, disable=not console.is_terminal)
    with _termination_interrupts(), bar as progress:
        task, sources = progress.add_task("rounding", total=stored_tensors(source)), set[str]()
        for tensor in quantize_checkpoint(source, out, options.scheme):
            sources.add(tensor.source)
            progress.update(task, completed=len(sources))
            if tensor.error is not None:
                layer, kind = _layer_and_kind(tensor.name)
                errors.setdefault(kind, []).append((tensor.error, layer))
    if not errors:
        raise ModelError(f"{source}: has no linear layer that {options.scheme} rounds")
    Console().print(_table(errors))
    print(f"wrote {out}")
    return 0


@contextmanager
def _termination_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM, too: an interruption leaves no half-written model."""
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def _layer_and_kind(name: str) -> tuple[str, str]:
    """Return layer and kind of a matrix: "3", "mlp.down_proj" for "model.layers.3.mlp.down_proj.weight".

    All experts of a layer have one kind: "mlp.experts.*.down_proj".
    """
    layer, _, kind = name.rpartition("layers.")[2].removesuffix(".weight").partition(".")
    return layer, re.sub(r"\.experts\.\d+\.", ".experts.*.", kind)


def _table(errors: dict[str, list[tuple[float, str]]]) -> Table:
    table = Table(title="relative error of the rounded weights")
    for heading in ("matrix", "mean", "largest", "in layer"):
        table.add_column(heading, justify="left" if heading == "matrix" else "right")
    for kind, by_layer in sorted(errors.items()):
        largest, layer = max(by_layer)
        mean = sum(error for error, _ in by_layer) / len(by_layer)
        table.add_row(kind, f"{mean:.4f}", f"{largest:.4f}", layer)
    return table
