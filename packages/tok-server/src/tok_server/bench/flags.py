"""Flags of `tok bench` and its subcommands; `tok_server.flags` has those of `tok bench kernels`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from tok_core.config import TRACE_STEPS
from tok_server.flags import BENCH_EXAMPLES, ENGINE_FLAGS, add_bench_kernels, add_engine_flags

EXAMPLES = """examples:
  tok bench offline --workload mine.jsonl --model ./my-model --plot out.png
  tok bench offline --workload monkeys --workload-dir DIR --limit 16 --model ./config-only \\
      --load-format dummy --eos-probability 0.0078125 --json
  tok bench serve --url http://127.0.0.1:10210 --workload mine.jsonl --stream
  tok bench manager --workload monkeys --sequences 8192 --json
  tok bench server --json
"""
OFFLINE_EXAMPLES = """examples:
  tok bench offline --workload mine.jsonl
  tok bench offline --workload mine.jsonl --model ./my-model --reps 3 --json
  tok bench offline --workload mine.jsonl --plot out.png --trace steps.json
"""
SERVE_EXAMPLES = """examples:
  tok bench serve --url http://127.0.0.1:10210 --workload mine.jsonl --stream --plot out.png
  tok bench serve --url http://127.0.0.1:8000/v1 --model my-model --workload mine.jsonl --concurrency 256 --wait 300
"""
MANAGER_EXAMPLES = """examples:
  tok bench manager --workload decode
  tok bench manager --workload monkeys --sequences 65536 --json
"""

SERVER_EXAMPLES = """examples:
  tok bench server
  tok bench server --scenario streamed --seconds 20 --json
  tok bench server --scenario whole --rate 3000
"""

SERVER_SCENARIOS = {
    "whole": "requests of 8 tokens, answered whole",
    "streamed": "requests of 128 tokens, each token an event",
    "samples": "requests of n = 1,024 samples of 16 tokens, answered whole",
}

MANAGER_WORKLOADS = {
    "decode": "512 tokens of prompt and 256 of output: the steps that only decode",
    "monkeys": "many samples each of 64 to 256 prompts of 704 tokens, of geometric lengths around 128",
    "sharegpt": "one sample a prompt, log-normal lengths of both",
    "churn": "outputs of 1 to 8 tokens",
    "regroup": "samples of 256 prompts, 1 %% of them replaced before every step",
    "admission": "the start of as many requests of 1,000 tokens, half of each shared with others",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of `tok bench` and their flags."""
    parser.description = "Measure throughput on a fixed list of requests."
    parser.epilog = EXAMPLES
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", title="kinds", required=True)
    offline = kinds.add_parser(
        "offline",
        help="the engine itself",
        description="Measure the engine itself, all requests given to it at once.",
        epilog=OFFLINE_EXAMPLES,
    )
    add_offline(offline)
    serve = kinds.add_parser(
        "serve",
        help="any OpenAI-compatible server, over HTTP",
        description="Measure any OpenAI-compatible server over HTTP.",
        epilog=SERVE_EXAMPLES,
    )
    add_serve_bench(serve)
    kernels = kinds.add_parser(
        "kernels",
        help="each kernel, beside what the machine allows",
        description="Measure each kernel of a model beside the time that its bytes or its products take here.",
        epilog=BENCH_EXAMPLES,
    )
    add_bench_kernels(kernels)
    manager = kinds.add_parser(
        "manager",
        help="the manager alone, its worker simulated",
        description="Measure what the manager's CPU costs a generated token; its worker computes nothing.",
        epilog=MANAGER_EXAMPLES,
    )
    add_manager(manager)
    server = kinds.add_parser(
        "server",
        help="the server alone, its worker simulated",
        description="Measure what the HTTP server and the manager cost; the worker computes nothing.",
        epilog=SERVER_EXAMPLES,
    )
    add_server(server)


def add_manager(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tok bench manager`."""
    told = "; ".join(f"{name}: {what}" for name, what in MANAGER_WORKLOADS.items())
    add = parser.add_argument
    add("--workload", required=True, choices=tuple(MANAGER_WORKLOADS), metavar="W", help=told)
    add("--sequences", type=int, default=8192, metavar="N", help="that run at once (default: %(default)s)")
    add("--stop", metavar="STRING", help="a stop string that every request asks for (default: none)")
    add("--step-time", type=float, default=0.0, metavar="MS", help="ms that the worker takes a step (default: 0)")
    add("--json", action="store_true", help="print one line of JSON instead of a table")
    parser.set_defaults(module="tok_server.commands.bench_manager")


def add_server(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tok bench server`."""
    told = "; ".join(f"{name}: {what}" for name, what in SERVER_SCENARIOS.items())
    add = parser.add_argument
    add("--scenario", choices=tuple(SERVER_SCENARIOS), metavar="S", help=f"only this one (default: all). {told}")
    add("--rate", type=float, metavar="R", help="requests a second, by the clock (default: all that are answered)")
    add("--clients", type=int, default=1, metavar="N", help="processes that ask (default: %(default)s)")
    add("--seconds", type=float, default=5.0, metavar="S", help="measured of each scenario (default: %(default)s)")
    add("--json", action="store_true", help="print a line of JSON for each scenario instead of a table")
    parser.set_defaults(module="tok_server.commands.bench_server")


def add_offline(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tok bench offline`."""
    _add_workload(parser)
    parser.add_argument("--model", metavar="MODEL", help="a directory or a hub id (default: the demo model)")
    parser.add_argument(
        "--keep-engine",
        action="store_true",
        help="one engine for all repetitions: later ones find the prompts of the first in its cache",
    )
    parser.add_argument("--text", action="store_true", help="make texts of the tokens, too")
    add = _add_output(parser)
    add("--trace", type=Path, metavar="FILE.json", help="trace steps in the middle of one more run, in Chrome's format")
    add("--trace-steps", type=int, metavar="N", help=f"how many (default: {TRACE_STEPS})")
    add_engine_flags(
        parser.add_argument_group("engine, as of tok serve"),
        tuple(name for name in ENGINE_FLAGS if name != "generation_config"),
        max_model_len="most tokens of prompt and answer together (default: what the workload needs)",
        eos_probability="with --load-format dummy: how likely each token is an end id (default: as likely as any)",
    )


def add_serve_bench(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tok bench serve`."""
    parser.add_argument("--url", required=True, help="base URL of the server, with or without /v1")
    _add_workload(parser)
    add = parser.add_argument_group("requests").add_argument
    add("--model", metavar="NAME", help="name of the model (default: the first one the server lists)")
    add("--api-key", metavar="KEY", help="the server's key")
    add("--label", default="server", metavar="NAME", help="what the result calls the server (default: %(default)s)")
    add("--concurrency", type=int, default=4096, metavar="N", help="requests open at once (default: %(default)s)")
    add("--stream", action="store_true", help="stream the answers, to measure the time to the first token")
    add("--reset-path", metavar="PATH", help="POST to this path before each repetition, to empty the server's cache")
    add("--wait", type=float, default=0.0, metavar="S", help="seconds to wait for the server (default: %(default)g)")
    add("--timeout", type=float, default=3600.0, metavar="S", help="seconds a request may take (default: %(default)g)")
    _add_output(parser)


def _add_workload(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("workload").add_argument
    add("--workload", required=True, metavar="W", help="monkeys, sharegpt, decode or a JSONL file")
    add("--workload-dir", type=Path, metavar="DIR", help="where the named workloads are (they do not come with tok)")
    add("--limit", type=int, metavar="N", help="only the first N requests")
    add("--n", type=int, metavar="N", help="samples of each prompt (default: what the workload says)")
    add("--max-tokens", type=int, metavar="N", help="no answer longer than N tokens")
    add("--temperature", type=float, metavar="T", help="of all requests (default: what the workload says)")
    add("--top-p", type=float, metavar="P", help="of all requests (default: what the workload says)")
    add("--reps", type=int, default=2, metavar="N", help="repetitions (default: %(default)s)")


def _add_output(parser: argparse.ArgumentParser) -> Callable[..., argparse.Action]:
    """Add the output flags. Returns the group's `add_argument`, for further flags."""
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="print one line of JSON for each repetition instead of a table")
    add("--plot", type=Path, metavar="FILE.png", help="plot throughput and running sequences over time")
    return add
