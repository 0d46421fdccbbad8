"""`tok quantize`: write a model with its linear layers rounded to fewer bits."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tok_core.errors import ModelError
from tok_core.model_config import resolve
from tok_server.commands.models import stored_tensors


def main(options: argparse.Namespace) -> int:
    """Write the rounded model and print the errors of its layers. Errors: InvalidField, ModelError."""
    from tok_core.models.weights import round_checkpoint

    source, out = resolve(options.model, options.data_dir), Path(options.out).expanduser()
    errors: dict[str, dict[int, float]] = {}
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("rounding", total=stored_tensors(source))
        for tensor in round_checkpoint(source, out, options.scheme):
            progress.advance(task)
            if tensor.error is not None:
                layer, kind = _place(tensor.name)
                errors.setdefault(kind, {})[layer] = tensor.error
    if not errors:
        raise ModelError(f"{source}: has no linear layer that {options.scheme} rounds")
    Console().print(_table(errors))
    print(f"wrote {out}")
    return 0


def _place(name: str) -> tuple[int, str]:
    """Return layer and kind of a matrix: 3, "mlp.down_proj" for "model.layers.3.mlp.down_proj.weight"."""
    layer, _, kind = name.rpartition("layers.")[2].removesuffix(".weight").partition(".")
    return int(layer), kind


def _table(errors: dict[str, dict[int, float]]) -> Table:
    table = Table(title="relative error of the rounded weights")
    for heading in ("matrix", "mean", "largest", "in layer"):
        table.add_column(heading, justify="left" if heading == "matrix" else "right")
    for kind, found in sorted(errors.items()):
        worst = max(found, key=found.__getitem__)
        table.add_row(kind, f"{sum(found.values()) / len(found):.4f}", f"{found[worst]:.4f}", str(worst))
    return table
