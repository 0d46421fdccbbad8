"""`tok bench manager`: its flags, and its output, a table or one line of JSON."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import msgspec

from tok_core import InvalidField

EXAMPLES = """examples:
  tok bench manager --workload decode
  tok bench manager --workload monkeys --sequences 65536 --json
"""
WORKLOADS = {
    "decode": "decode steps only, prompts of 512 tokens, outputs of 256",
    "monkeys": "many samples of each of 64 to 256 prompts, geometric lengths with mean 128",
    "sharegpt": "one sample per prompt, log-normal prompt and output lengths",
    "churn": "outputs of 1 to 8 tokens",
    "regroup": "samples of 256 shared prompts, 1 %% of the samples replaced before every step",
    "admission": "admission of prompts of 1,000 tokens, half of each shared",
}
MAX_BENCH_SEQUENCES = 65_536


def add_command(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command and its flags, with the method `add_parser` of `tok bench`'s subparsers."""
    text = "Measure the manager's CPU time per output token, with a simulated worker."
    help = "the manager alone, with a simulated worker"
    parser = add_parser("manager", help=help, description=text, epilog=EXAMPLES)
    descriptions = "; ".join(f"{name}: {what}" for name, what in WORKLOADS.items())
    add = parser.add_argument
    add("--workload", required=True, choices=tuple(WORKLOADS), metavar="W", help=descriptions)
    add("--sequences", type=int, default=8192, metavar="N", help="sequences running at once (default: %(default)s)")
    add("--stop", metavar="STRING", help="stop string of every request (default: none)")
    add("--step-time", type=float, default=0.0, metavar="MS", help="simulated milliseconds per step (default: 0)")
    add("--json", action="store_true", help="print one line of JSON instead of a table")
    parser.set_defaults(module="tok_server.bench.manager.command")


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
