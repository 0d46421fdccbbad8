"""`tok bench manager`: measure the manager's CPU time per token and print it as a table or one line of JSON."""

from __future__ import annotations

import argparse
import math

import msgspec

from tok_core import InvalidField

MAX_BENCH_SEQUENCES = 65_536


def main(options: argparse.Namespace) -> int:
    """Measure and print the result. Errors: InvalidField."""
    sequences, milliseconds = options.sequences, options.step_time
    if not 1 <= sequences <= MAX_BENCH_SEQUENCES:
        raise InvalidField("sequences", sequences, f"integers from 1 to {MAX_BENCH_SEQUENCES}")
    if not math.isfinite(milliseconds) or milliseconds < 0:
        raise InvalidField("step_time", milliseconds, "milliseconds from 0")
    from tok_server.bench.manager.manager import run_manager
    from tok_server.bench.manager.result import table

    result = run_manager(options.workload, sequences, options.stop, milliseconds / 1e3)
    print(msgspec.json.encode(result).decode() if options.json else table(result))
    return 0
