"""Flags of the commands that serve nothing: `tok batch`, `tok warm`, `tok kernels` and `tok bench kernels`."""

from __future__ import annotations

import argparse

from tok_server.flags.engine_flags import ENGINE_FLAGS, add_engine_flags
from tok_server.flags.server_flags import add_formats

BATCH_EXAMPLES = """examples:
  tok batch questions.jsonl -o answers.jsonl --model Qwen/Qwen2.5-0.5B-Instruct
  tok batch questions.jsonl -o answers.jsonl     run again: resumes an interrupted run
  tok batch questions.jsonl -o answers.jsonl --retry-failed

an input line and its output line, in the format of OpenAI's batch API:
  {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "One, two,", "max_tokens": 8}}
  {"id": "batch_req_…", "custom_id": "1", "response": {"status_code": 200, …, "body": {…}}, "error": null}

exit codes: 0 all lines answered, 1 some failed or nothing was run, 2 invalid flags or input, 130 interrupted
"""

KERNELS_EXAMPLES = """examples:
  tok kernels --model ./my-model
  tok kernels --heads 64 --kv-heads 8 --head-dim 128 --layers 80 --measure
"""
BENCH_EXAMPLES = """examples:
  tok bench kernels
  tok bench kernels --model ./my-model --json
  tok bench kernels --model ./my-model --tp 4
"""
QUANTIZE_EXAMPLES = """examples:
  tok quantize ./my-model ./my-model-fp8
  tok quantize Qwen/Qwen3-8B ./qwen3-8b-int4 --scheme int4-g128
"""
WARM_EXAMPLES = """examples:
  tok warm Qwen/Qwen3-8B --out ./kernels
  tok serve Qwen/Qwen3-8B --cache-dir ./kernels
  tok warm ./my-model --out ./kernels --kv-cache-dtype fp8 --max-model-len 32768
"""
SIZES = ("heads", "kv_heads", "head_dim", "layers")
ROUNDING_SCHEMES = ("fp8-dynamic", "fp8-block", "int4-g128", "int4-g64")
KERNEL_ENGINE_FLAGS = ("device", "dtype", "backend", "kv_cache_dtype", "page_size", "data_dir", "tp")
"""Engine flags that influence which kernels are chosen."""


def add_batch(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tok batch`."""
    parser.add_argument("file", metavar="FILE.jsonl", help="file of requests, one per line")
    parser.add_argument(
        "-o", "--output", required=True, metavar="OUT.jsonl", help="file for the answers, in the order of the requests"
    )
    add_model(parser)
    parser.add_argument(
        "--retry-failed", action="store_true", help="answer the failed lines of a finished OUT.jsonl again"
    )
    add_formats(parser.add_argument_group("tool calls and reasoning"))
    add_engine_flags(parser.add_argument_group("engine, as in tok serve"))


def add_quantize(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tok quantize`."""
    parser.add_argument("model", metavar="MODEL", help="a directory or a Hugging Face hub id")
    parser.add_argument("out", metavar="OUT", help="directory to write, which must not exist yet")
    parser.add_argument(
        "--scheme",
        choices=ROUNDING_SCHEMES,
        default=ROUNDING_SCHEMES[0],
        help="fp8-dynamic: float8, a scale for each row; fp8-block: a scale for each block of 128 × 128; int4-g128, "
        "int4-g64: a scale for each 128 or 64 columns (default: %(default)s)",
    )
    add_engine_flags(parser, ("data_dir",))


def add_warm(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tok warm`."""
    parser.add_argument("model", metavar="MODEL", help="a directory or a Hugging Face hub id")
    parser.add_argument(
        "--out", required=True, dest="cache_dir", metavar="DIR", help="directory to write, for tok serve --cache-dir"
    )
    names = [name for name in ENGINE_FLAGS if name != "cache_dir"]
    add_engine_flags(parser.add_argument_group("engine, as in tok serve"), names)


def add_kernels(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tok kernels`."""
    add_model(parser)
    sizes = parser.add_argument_group("sizes that replace those of the model").add_argument
    sizes("--heads", type=int, metavar="N", help="number of query heads")
    sizes("--kv-heads", type=int, metavar="N", help="number of key/value heads")
    sizes("--head-dim", type=int, metavar="N", help="dimension of each head")
    sizes("--layers", type=int, metavar="N", help="number of layers, which share one attention plan per step")
    parser.add_argument("--measure", action="store_true", help="measure again instead of using cached measurements")
    _add_engine(parser)


def add_bench_kernels(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tok bench kernels`."""
    add_model(parser)
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of a table")
    _add_engine(parser, "ep")
    parser.set_defaults(module="tok_server.commands.bench_kernels")


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the flag `--model`."""
    parser.add_argument(
        "--model", metavar="MODEL", help="a directory or a Hugging Face hub id (default: the demo model)"
    )


def _add_engine(parser: argparse.ArgumentParser, *more: str) -> None:
    tp = "tensor-parallel ranks; only the shard of rank 0 is computed, on one device (default: 1)"
    add_engine_flags(parser.add_argument_group("engine, as in tok serve"), (*KERNEL_ENGINE_FLAGS, *more), tp=tp)
