"""Flags of `tok kernels` and `tok bench kernels`."""

from __future__ import annotations

import argparse

from tok_server.flags.engine_flags import add_engine_flags

KERNELS_EXAMPLES = """examples:
  tok kernels --model ./my-model
  tok kernels --heads 64 --kv-heads 8 --head-dim 128 --layers 80 --measure
"""
BENCH_EXAMPLES = """examples:
  tok bench kernels
  tok bench kernels --model ./my-model --json
  tok bench kernels --model ./my-model --tp 4
"""
SIZES = ("heads", "kv_heads", "head_dim", "layers")
KERNEL_ENGINE_FLAGS = ("device", "dtype", "backend", "kv_cache_dtype", "page_size", "data_dir", "tp")
"""Engine flags that influence which kernels are chosen."""


def add_kernels(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tok kernels`."""
    _add_model(parser)
    sizes = parser.add_argument_group("sizes that replace those of the model").add_argument
    sizes("--heads", type=int, metavar="N", help="number of query heads")
    sizes("--kv-heads", type=int, metavar="N", help="number of key/value heads")
    sizes("--head-dim", type=int, metavar="N", help="dimension of each head")
    sizes("--layers", type=int, metavar="N", help="number of layers, which share one attention plan per step")
    parser.add_argument("--measure", action="store_true", help="measure again instead of using cached measurements")
    _add_engine(parser)


def add_bench_kernels(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tok bench kernels`."""
    _add_model(parser)
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of a table")
    _add_engine(parser)
    parser.set_defaults(module="tok_server.commands.bench_kernels")


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", metavar="MODEL", help="a directory or a Hugging Face hub id (default: the demo model)"
    )


def _add_engine(parser: argparse.ArgumentParser) -> None:
    tp = "tensor-parallel ranks; only the shard of rank 0 is computed, on one device (default: 1)"
    add_engine_flags(parser.add_argument_group("engine, as in tok serve"), KERNEL_ENGINE_FLAGS, tp=tp)
