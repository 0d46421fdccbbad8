"""The flags of `tok serve` and `tok chat`, and what they become: engine configuration and server settings."""

from __future__ import annotations

import argparse
from typing import get_args

from tok_core import EngineConfig
from tok_core.config import BackendName, Device, DType, LoadFormat
from tok_server.default_model import model_and_name
from tok_server.settings import Settings

LOG_LEVELS = ("debug", "info", "warning", "error")

EXAMPLES = """examples:
  tok serve                              serve the small demo model at http://127.0.0.1:10210
  tok serve Qwen/Qwen2.5-0.5B-Instruct   serve a model from the Hugging Face hub
  tok chat                               talk to the demo model right here
  tok COMMAND --help                     what a command can do
"""
SERVE_EXAMPLES = """examples:
  tok serve
  tok serve ./my-model --port 8000 --max-model-len 4096
  tok serve Qwen/Qwen3-0.6B --host 0.0.0.0 --api-key SECRET
"""
CHAT_EXAMPLES = """examples:
  tok chat
  tok chat ./my-model --temperature 0
  tok chat --url http://127.0.0.1:10210/v1
"""
MODELS_EXAMPLES = """examples:
  tok models
  tok models ./my-model
"""

ENGINE_FLAGS = (
    "data_dir",
    "device",
    "dtype",
    "backend",
    "load_format",
    "page_size",
    "kv_cache_tokens",
    "gpu_memory_fraction",
    "max_running",
    "max_step_tokens",
    "max_model_len",
    "dp",
    "tp",
    "pp",
)


def add_serve(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `tok serve`."""
    _add_model(parser, "serve")
    server = parser.add_argument_group("server")
    server.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: %(default)s, this machine only; 0.0.0.0: all addresses)",
    )
    server.add_argument(
        "--port", type=int, default=10210, help="port to listen on (default: %(default)s; 0: any free one)"
    )
    server.add_argument("--api-key", metavar="KEY", help="serve only clients that send this key")
    server.add_argument(
        "--data-dir", metavar="DIR", help="where fetched models are kept (default: the hub library's own cache)"
    )
    server.add_argument("--log-level", choices=LOG_LEVELS, default="info", help="what to log (default: %(default)s)")
    engine = parser.add_argument_group("engine")
    _add_device(engine)
    engine.add_argument(
        "--backend",
        choices=get_args(BackendName),
        default="auto",
        help="who computes; auto: Triton kernels on a GPU, plain torch (reference) on a CPU",
    )
    engine.add_argument(
        "--load-format",
        choices=get_args(LoadFormat),
        default="auto",
        help="dummy: random weights, to measure speed without a checkpoint (default: %(default)s)",
    )
    _number(engine, "page-size", "tokens in a page of the KV cache, a power of two", 16)
    _number(engine, "kv-cache-tokens", "tokens the KV cache holds (default: what the memory allows)")
    engine.add_argument(
        "--gpu-memory-fraction",
        type=float,
        default=0.9,
        metavar="F",
        help="share of the GPU's memory to use (default: %(default)s)",
    )
    _number(engine, "max-running", "most samples that run at once (default: 8192 on a GPU, 256 on a CPU)")
    _number(engine, "max-step-tokens", "most tokens of a forward pass (default: 8192 on a GPU, 1024 on a CPU)")
    _number(engine, "max-model-len", "most tokens of prompt and answer together (default: the model's)")
    _number(engine, "dp", "data-parallel replicas; this version allows only 1", 1)
    _number(engine, "tp", "tensor-parallel ranks; this version allows only 1", 1)
    _number(engine, "pp", "pipeline stages; this version allows only 1", 1)


def add_chat(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `tok chat`."""
    _add_model(parser, "talk to")
    parser.add_argument("--url", help="talk to the server at this base URL instead of loading a model")
    parser.add_argument("--api-key", metavar="KEY", help="the server's key, with --url")
    parser.add_argument("--system", metavar="TEXT", help="instructions ahead of the conversation")
    parser.add_argument(
        "--temperature", type=float, default=0.7, metavar="T", help="0: always the likeliest (%(default)s)"
    )
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of an answer")
    _add_device(parser.add_argument_group("engine, without --url"))


def _add_model(parser: argparse.ArgumentParser, verb: str) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help=f"model to {verb}: a directory or a hub id (default: the demo model)",
    )


def _add_device(group: argparse._ActionsContainer) -> None:
    group.add_argument("--device", choices=get_args(Device), default="auto", help="auto: the GPU where there is one")
    group.add_argument(
        "--dtype", choices=get_args(DType), default="auto", help="auto: bfloat16 on a GPU, float32 on a CPU"
    )


def _number(group: argparse._ActionsContainer, name: str, text: str, default: int | None = None) -> None:
    shown = text if default is None else f"{text} (default: {default})"
    group.add_argument(f"--{name}", type=int, default=default, metavar="N", help=shown)


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """From the flags of a command that loads a model. Errors: InvalidField."""
    model, _ = model_and_name(options.model)
    given = {name: getattr(options, name) for name in ENGINE_FLAGS if hasattr(options, name)}
    return EngineConfig(model=model, **given)


def server_settings(options: argparse.Namespace) -> Settings:
    """From the flags of `tok serve`. Errors: InvalidField."""
    _, name = model_and_name(options.model)
    return Settings(model_name=name, host=options.host, port=options.port, api_key=options.api_key)
