"""Flags of `tok serve` and `tok chat`, and their conversion to an engine configuration and server settings."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import get_args

import msgspec

from tok_core import EngineConfig
from tok_core.config import AdmissionName, BackendName, Device, DType, GenerationConfig, KVCacheDType, LoadFormat
from tok_server.flags.default_model import model_and_name
from tok_server.flags.server_flags import add_formats, add_limits, add_server, settings_of
from tok_server.settings import Settings

TOK_EXAMPLES = """examples:
  tok serve                              serve the small demo model at http://127.0.0.1:10210
  tok serve Qwen/Qwen2.5-0.5B-Instruct   serve a model from the Hugging Face hub
  tok chat                               talk to the demo model right here
  tok COMMAND --help                     what a command can do
"""
SERVE_EXAMPLES = """examples:
  tok serve
  tok serve ./my-model --port 8000 --max-model-len 4096
  tok serve Qwen/Qwen3-0.6B --host 0.0.0.0 --api-key SECRET --max-queued 1000 --request-timeout 600
"""
CHAT_EXAMPLES = """examples:
  tok chat
  tok chat ./my-model --temperature 0
  tok chat --url http://127.0.0.1:10210/v1 --system "Answer in one sentence."

commands within: /reset, /system TEXT, /save FILE, /help, /exit
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
    "generation_config",
    "ignore_config_keys",
    "kv_cache_dtype",
    "page_size",
    "kv_cache_tokens",
    "gpu_memory_fraction",
    "max_running",
    "max_step_tokens",
    "max_model_len",
    "dp",
    "tp",
    "pp",
    "ray",
    "async_tp_threshold",
    "prefix_groups",
    "admission",
    "cuda_graphs",
    "run_ahead",
    "seed",
    "step_timeout",
    "start_timeout",
    "max_restarts",
    "restart_window",
    "eos_probability",
)

CHAT_TEMPERATURE = 0.7

DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(EngineConfig)}
"""Default of each engine flag."""


def add_serve(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tok serve`."""
    _add_model(parser, "serve")
    server = parser.add_argument_group("server")
    add_server(server)
    server.add_argument(
        "--data-dir",
        metavar="DIR",
        help="where fetched models, files and batches are kept (default: the hub library's own cache, no batches)",
    )
    add_formats(server)
    add_limits(parser.add_argument_group("limits"))
    _add_engine(parser.add_argument_group("engine"))


def add_engine_flags(group: argparse._ActionsContainer, names: Collection[str] = ENGINE_FLAGS, **help: str) -> None:
    """Add the engine flags of `tok serve` that are in `names`, with the help texts in `help` replacing its own.

    The flags are for commands that serve nothing, so the help of `data_dir` mentions models only.
    """
    texts = {"data_dir": "where fetched models are kept (default: the hub library's own cache)", **help}
    serve = argparse.ArgumentParser(add_help=False)
    add_serve(serve)
    for action in serve._actions:
        if action.dest in names:
            action.help = texts.get(action.dest, action.help)
            group._add_action(action)


def _add_engine(group: argparse._ActionsContainer) -> None:
    _add_device(group)
    _choice(group, "backend", BackendName, "who computes; auto: the fastest on a GPU, plain torch (reference) on a CPU")
    _choice(group, "load_format", LoadFormat, "dummy: random weights, to measure speed without a checkpoint")
    text = "whence come sampling parameters that a request leaves out; auto: the model's generation_config.json"
    _choice(group, "generation_config", GenerationConfig, text)
    group.add_argument(
        "--ignore-config-keys",
        type=lambda text: tuple(text.split(",")),
        metavar="KEY,…",
        help="keys of the model's config.json to pass over although they are not known (default: none)",
    )
    _choice(group, "kv_cache_dtype", KVCacheDType, "of the KV cache; auto: as --dtype, fp8: half as large, less exact")
    _number(group, "page_size", "tokens in a page of the KV cache, a power of two")
    _number(group, "kv_cache_tokens", "tokens the KV cache holds", unset="what the memory allows")
    _number(group, "gpu_memory_fraction", "share of the GPU's memory to use", kind=float, metavar="F")
    _number(group, "max_running", "most samples that run at once", unset="8192 on a GPU, 256 on a CPU")
    _number(group, "max_step_tokens", "most tokens of a forward pass", unset="8192 on a GPU, 1024 on a CPU")
    _number(group, "max_model_len", "most tokens of prompt and answer together", unset="the model's")
    _number(group, "dp", "data-parallel replicas, each of --tp times --pp devices")
    _number(group, "tp", "tensor-parallel ranks that share each layer")
    _number(group, "pp", "pipeline stages that the layers are split into")
    group.add_argument(
        "--ray", metavar="ADDRESS", help="Ray cluster that places the replicas: auto, or HOST:PORT (default: none)"
    )
    _number(
        group, "async_tp_threshold", "step tokens from which products and exchange overlap, 0: never", unset="measured"
    )
    _off(group, "prefix_groups", "let every sequence read its shared prefix by itself")
    text = "which waiting samples start; watermark: all that fit now, instead of a forecast of page use"
    _choice(group, "admission", AdmissionName, text)
    _off(group, "cuda_graphs", "launch every kernel of every step instead of replaying decode steps")
    _number(group, "run_ahead", "steps queued at the worker at most", unset="as many as keep it busy")
    _number(group, "seed", "of the random weights, with --load-format dummy")
    _number(
        group,
        "eos_probability",
        "with --load-format dummy: how likely each token is an end id, at temperature 0.6",
        kind=float,
        metavar="P",
        unset="as likely as any",
    )
    _number(group, "step_timeout", "seconds after which a step, or a silent process, hangs", kind=float, metavar="S")
    _number(group, "start_timeout", "seconds that a start may take without any progress", kind=float, metavar="S")
    _number(group, "max_restarts", "times that an engine that died is started anew within --restart-window")
    _number(group, "restart_window", "seconds in which --max-restarts are allowed", kind=float, metavar="S")


def add_chat(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tok chat`."""
    _add_model(parser, "talk to")
    parser.add_argument("--url", help="talk to the server at this base URL instead of loading a model")
    parser.add_argument("--api-key", metavar="KEY", help="the server's key, with --url")
    parser.add_argument("--system", metavar="TEXT", help="instructions ahead of the conversation")
    text = f"0: always the likeliest (default: the model's own, else the server's, or {CHAT_TEMPERATURE} here)"
    parser.add_argument("--temperature", type=float, metavar="T", help=text)
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
    _choice(group, "device", Device, "auto: the GPU where there is one")
    _choice(group, "dtype", DType, "auto: bfloat16 on a GPU, float32 on a CPU")


def _choice(group: argparse._ActionsContainer, field: str, allowed: object, text: str) -> None:
    group.add_argument(_flag(field), choices=get_args(allowed), default=DEFAULTS[field], help=text)


def _number(
    group: argparse._ActionsContainer,
    field: str,
    text: str,
    *,
    kind: type[int] | type[float] = int,
    metavar: str = "N",
    unset: str | None = None,
) -> None:
    """Add a numeric flag. `unset` describes the default if that is not a number."""
    default = DEFAULTS[field]
    shown = f"{text} (default: {unset or f'{default:g}'})"
    group.add_argument(_flag(field), type=kind, default=default, metavar=metavar, help=shown)


def _off(group: argparse._ActionsContainer, field: str, text: str) -> None:
    group.add_argument(f"--no-{field.replace('_', '-')}", dest=field, action="store_false", help=text)


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """Return the engine configuration from the flags of a command that loads a model. Errors: InvalidField."""
    model, _ = model_and_name(options.model)
    given = {name: getattr(options, name) for name in ENGINE_FLAGS if hasattr(options, name)}
    return EngineConfig(model=model, **given)


def server_settings(options: argparse.Namespace) -> Settings:
    """Return the server settings from the flags of `tok serve`. Errors: InvalidField."""
    _, name = model_and_name(options.model)
    return settings_of(options, name)
