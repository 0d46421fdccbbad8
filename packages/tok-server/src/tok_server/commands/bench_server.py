"""`tok bench server`: what serving costs without a model, as a table or a line of JSON for each scenario."""

from __future__ import annotations

import argparse
import asyncio
import math

import msgspec

from tok_core import InvalidField

MOST_CLIENTS = 64


def main(options: argparse.Namespace) -> int:
    """Measures and prints. Returns 1 where requests failed. Errors: InvalidField, TokError."""
    if not 1 <= options.clients <= MOST_CLIENTS:
        raise InvalidField("clients", options.clients, f"integers from 1 to {MOST_CLIENTS}")
    if not math.isfinite(options.seconds) or options.seconds <= 0:
        raise InvalidField("seconds", options.seconds, "seconds above 0")
    from tok_server.bench.server import SCENARIOS, run_server, table

    names = list(SCENARIOS) if options.scenario is None else [options.scenario]
    results = asyncio.run(run_server(names, options.clients, options.seconds))
    if options.json:
        for result in results:
            print(msgspec.json.encode(result).decode())
    else:
        print(table(results))
    return 1 if any(result.failures for result in results) else 0
