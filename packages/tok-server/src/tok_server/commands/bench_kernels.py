"""`tok bench kernels`: compare each kernel with the time that its bytes or its FLOPs take on this machine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from tok_server.flags import engine_config

if TYPE_CHECKING:
    from tok_core.worker import KernelsMeasured, KernelTime


def main(options: argparse.Namespace) -> int:
    """Measure and print the results. Errors: InvalidField without a CUDA device, TokError."""
    from tok_core.worker.startup.kernel_report import time_kernels

    measured = time_kernels(engine_config(options))
    kernels = list(measured.kernels)
    if options.json:
        print(as_json(measured, kernels))
    else:
        show(measured, kernels, Console())
    return 0


def as_json(measured: KernelsMeasured, kernels: Sequence[KernelTime]) -> str:
    """Return all results as one line of JSON. `tokens_per_second` is the limit that the largest forward's GEMMs set."""
    return json.dumps(
        {
            "device": measured.device,
            "backend": measured.backend,
            "tp": measured.tp,
            "bandwidth_tb_s": round(measured.bandwidth, 3),
            "rate_tflop_s": round(measured.rate, 1),
            "fp8_rate_tflop_s": round(measured.fp8_rate, 1),
            "tokens_per_second": round(_forward(kernels).tokens_per_second, 1),
            "kernels": [
                {
                    "kernel": one.kernel,
                    "size": one.size,
                    "ms": round(one.ms, 6),
                    "floor_ms": round(one.floor_ms, 6),
                    "share_of_floor": round(one.share, 3),
                }
                for one in kernels
            ],
        }
    )


def show(measured: KernelsMeasured, kernels: Sequence[KernelTime], console: Console) -> None:
    """Print a row per kernel, and the tokens per second that the GEMMs of the largest forward allow."""
    caption = f"floor: bytes at {measured.bandwidth:.2f} TB/s (copy), GEMMs at {measured.rate:.0f} TFLOP/s"
    caption += f", of float8 at {measured.fp8_rate:.0f} TFLOP/s" if measured.fp8_rate else ""
    rank = f", rank 0 of {measured.tp}" if measured.tp > 1 else ""
    table = Table("kernel", "size", title=f"{measured.device}, {measured.backend}{rank}", caption=caption)
    for heading in ("ms", "floor ms", "of floor"):
        table.add_column(heading, justify="right")
    for one in kernels:
        table.add_row(one.kernel, one.size, f"{one.ms:.3f}", f"{one.floor_ms:.3f}", f"{one.share:.0%}")
    console.print(table)
    forward = _forward(kernels)
    all_ranks = f", {measured.tp} ranks together" if measured.tp > 1 else ""
    allowed = f"{forward.tokens_per_second:,.0f} tokens/s at {forward.tokens:,} rows{all_ranks}"
    console.print(f"GEMMs alone: {allowed}", highlight=False)


def _forward(kernels: Sequence[KernelTime]) -> KernelTime:
    """Return the largest measurement that covers a whole forward."""
    return max(kernels, key=lambda one: one.tokens)
