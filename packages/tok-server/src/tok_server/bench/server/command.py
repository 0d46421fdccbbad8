"""`tok bench server`: its flags, and its output, a table or a line of JSON per scenario."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import msgspec

from tok_core import InvalidField

EXAMPLES = """examples:
  tok bench server
  tok bench server --scenario streamed --seconds 20 --json
  tok bench server --scenario whole --rate 3000
"""
SERVER_SCENARIOS = {
    "whole": "8 output tokens, not streamed",
    "streamed": "128 output tokens, one event per token",
    "samples": "n = 1,024 samples of 16 tokens, not streamed",
}
MAX_CLIENTS = 64


def add_command(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command and its flags, with the method `add_parser` of `tok bench`'s subparsers."""
    text = "Measure throughput and CPU use of the HTTP server and the manager, with a simulated worker."
    help = "the HTTP server and the manager, with a simulated worker"
    parser = add_parser("server", help=help, description=text, epilog=EXAMPLES)
    descriptions = "; ".join(f"{name}: {what}" for name, what in SERVER_SCENARIOS.items())
    add = parser.add_argument
    add(
        "--scenario",
        choices=tuple(SERVER_SCENARIOS),
        metavar="S",
        help=f"scenario to run (default: all). {descriptions}",
    )
    add(
        "--rate",
        type=float,
        metavar="R",
        help="requests per second (default: each connection sends one after another)",
    )
    add("--clients", type=int, default=1, metavar="N", help="processes that send requests (default: %(default)s)")
    add(
        "--seconds",
        type=float,
        default=5.0,
        metavar="S",
        help="seconds per scenario (default: %(default)s)",
    )
    add("--json", action="store_true", help="print a line of JSON for each scenario instead of a table")
    parser.set_defaults(module="tok_server.bench.server.command")


def main(options: argparse.Namespace) -> int:
    """Measure and print the results. Returns 1 if requests failed. Errors: InvalidField, TokError."""
    if not 1 <= options.clients <= MAX_CLIENTS:
        raise InvalidField("clients", options.clients, f"integers from 1 to {MAX_CLIENTS}")
    if not math.isfinite(options.seconds) or options.seconds <= 0:
        raise InvalidField("seconds", options.seconds, "seconds above 0")
    if options.rate is not None and not (math.isfinite(options.rate) and options.rate > 0):
        raise InvalidField("rate", options.rate, "requests per second, above 0")
    if options.rate is not None and options.scenario is None:
        raise InvalidField("rate", options.rate, "only together with --scenario: each scenario has its own rate")
    from tok_server.bench.server.server import SCENARIOS, run_server, table
    from tok_server.http import run

    names = list(SCENARIOS) if options.scenario is None else [options.scenario]
    results = run(run_server(names, options.clients, options.seconds, options.rate or 0.0))
    if options.json:
        for result in results:
            print(msgspec.json.encode(result).decode())
    else:
        print(table(results))
    return 1 if any(result.failures for result in results) else 0
