"""Flags of `tok bench` and its subcommands.

`tok_server.flags` has those of `tok bench kernels`; the folders of SIMULATORS have their own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from tok_core.config import TRACE_STEPS
from tok_server.flags import BENCH_EXAMPLES, ENGINE_FLAGS, add_bench_kernels, add_engine_flags, add_model

EXAMPLES = """examples:
  tok bench offline --workload mine.jsonl --model ./my-model --plot out.png
  tok bench offline --workload monkeys --workload-dir DIR --limit 16 --model ./config-only \\
      --load-format dummy --eos-probability 0.0078125 --json
  tok bench serve --url http://127.0.0.1:10210 --workload mine.jsonl --stream
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
STEPS_EXAMPLES = """examples:
  tok bench steps
  tok bench steps --model ./config-only --load-format dummy --batch-sizes 1,8,32 --json
"""
STEPS_OWN_FLAGS = ("generation_config", "max_model_len", "dp", "eos_probability", "markov_probability")
"""Engine flags that `tok bench steps` does not take: it sets them itself, or they have no use in it."""

SIMULATORS = ("manager", "server")
"""Subcommands over a simulated worker; their folders are left out of the wheel (pyproject.toml)."""
NO_CHECKOUT = "this command needs a checkout of tok's repository; CONTRIBUTING.md in it says how to set one up"


def add_arguments(parser: argparse.ArgumentParser, called: str = "") -> None:
    """Add the subcommands of `tok bench` and their flags. Exit if `called` names one that this installation lacks."""
    parser.description = "Measure the throughput of the engine, of a server, or of their parts."
    parser.epilog = EXAMPLES
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", title="kinds", required=True)

    def kind(name: str, help: str, description: str, epilog: str) -> argparse.ArgumentParser:
        return kinds.add_parser(name, help=help, description=description, epilog=epilog)

    text = "Measure the engine without a server; all requests are submitted at once."
    add_offline(kind("offline", "the engine, without a server", text, OFFLINE_EXAMPLES))
    text = "Measure any OpenAI-compatible server over HTTP."
    add_serve_bench(kind("serve", "any OpenAI-compatible server, over HTTP", text, SERVE_EXAMPLES))
    text = "Compare each kernel with its lower bound: bytes at copy bandwidth, or FLOPs at the GEMM rate."
    help = "each kernel, compared with its lower bound on this machine"
    add_bench_kernels(kind("kernels", help, text, BENCH_EXAMPLES))
    text = "Measure decode steps at several batch sizes; their lower bound is their bytes at copy bandwidth."
    help = "decode steps at several batch sizes, compared with their lower bound on this machine"
    add_steps(kind("steps", help, text, STEPS_EXAMPLES))
    for name in SIMULATORS:
        if find_spec(f"tok_server.bench.{name}") is not None:
            import_module(f"tok_server.bench.{name}.command").add_command(kinds.add_parser)
        elif name == called:
            parser.exit(2, f"{parser.prog} {name}: error: {NO_CHECKOUT}\n")


def add_steps(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tok bench steps`."""
    add = parser.add_argument
    add_model(parser)
    add("--batch-sizes", default="1,4,8,16,32,64", metavar="B,…", help="sequences at once (default: %(default)s)")
    add("--prompt-tokens", type=int, default=512, metavar="N", help="tokens of each prompt (default: %(default)s)")
    add("--steps", type=int, default=128, metavar="N", help="steps measured at each size (default: %(default)s)")
    add("--reps", type=int, default=3, metavar="N", help="runs, of which the median counts (default: %(default)s)")
    add("--json", action="store_true", help="print a line of JSON for each batch size instead of a table")
    names = tuple(name for name in ENGINE_FLAGS if name not in STEPS_OWN_FLAGS)
    add_engine_flags(parser.add_argument_group("engine, as in tok serve"), names)
    parser.set_defaults(module="tok_server.commands.bench_steps")


def add_offline(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tok bench offline`."""
    _add_workload(parser)
    add_model(parser)
    parser.add_argument(
        "--keep-engine",
        action="store_true",
        help="use one engine for all repetitions; later ones find the prompts in its prefix cache",
    )
    parser.add_argument("--text", action="store_true", help="also detokenize the output")
    add = _add_output(parser)
    add("--trace", type=Path, metavar="FILE.json", help="trace steps of one more run, in Chrome's trace format")
    add("--trace-steps", type=int, metavar="N", help=f"number of steps to trace (default: {TRACE_STEPS})")
    add_engine_flags(
        parser.add_argument_group("engine, as in tok serve"),
        tuple(name for name in ENGINE_FLAGS if name != "generation_config"),
        max_model_len="maximum number of tokens of prompt and output together (default: what the workload needs)",
        eos_probability="with --load-format dummy: probability that a token ends its sample (default: as for any id)",
        markov_probability="with --load-format dummy: probability that a token is followed by its successor, for "
        "measuring --speculate (default: tokens follow each other by chance)",
    )


def add_serve_bench(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tok bench serve`."""
    parser.add_argument("--url", required=True, help="base URL of the server, with or without /v1")
    _add_workload(parser)
    add = parser.add_argument_group("requests").add_argument
    add("--model", metavar="NAME", help="name of the model (default: the first that the server lists)")
    add("--api-key", metavar="KEY", help="API key of the server")
    add("--label", default="server", metavar="NAME", help="name of the server in the results (default: %(default)s)")
    add("--concurrency", type=int, default=4096, metavar="N", help="requests open at once (default: %(default)s)")
    add("--stream", action="store_true", help="stream the answers, to measure time to first token (TTFT)")
    add(
        "--reset-path",
        metavar="PATH",
        help="path to POST to before each repetition, to empty the prefix cache",
    )
    add(
        "--wait",
        type=float,
        default=0.0,
        metavar="S",
        help="seconds to wait for the server to start (default: %(default)g)",
    )
    add("--timeout", type=float, default=3600.0, metavar="S", help="maximum seconds per request (default: %(default)g)")
    _add_output(parser)


def _add_workload(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("workload").add_argument
    add("--workload", required=True, metavar="W", help="JSONL file of requests, or monkeys, sharegpt or decode")
    add("--workload-dir", type=Path, metavar="DIR", help="directory of the named workloads (they are not part of tok)")
    add("--limit", type=int, metavar="N", help="use only the first N requests")
    add("--n", type=int, metavar="N", help="samples per prompt (default: the workload's)")
    add("--max-tokens", type=int, metavar="N", help="limit answers to N tokens")
    add("--temperature", type=float, metavar="T", help="temperature of all requests (default: the workload's)")
    add("--top-p", type=float, metavar="P", help="top-p of all requests (default: the workload's)")
    add("--reps", type=int, default=2, metavar="N", help="number of repetitions (default: %(default)s)")


def _add_output(parser: argparse.ArgumentParser) -> Callable[..., argparse.Action]:
    """Add the output flags. Returns the group's `add_argument`, for further flags."""
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="print one line of JSON for each repetition instead of a table")
    add("--plot", type=Path, metavar="FILE.png", help="plot throughput and running sequences over time")
    return add
