"""`tok bench server`: measure the cost of serving without a model; print a table, or a line of JSON per scenario."""

from __future__ import annotations

import argparse
import math

import msgspec

from tok_core import InvalidField
from tok_server.http import run

MAX_CLIENTS = 64


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

    names = list(SCENARIOS) if options.scenario is None else [options.scenario]
    results = run(run_server(names, options.clients, options.seconds, options.rate or 0.0))
    if options.json:
        for result in results:
            print(msgspec.json.encode(result).decode())
    else:
        print(table(results))
    return 1 if any(result.failures for result in results) else 0
