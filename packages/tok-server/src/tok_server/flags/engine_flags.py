"""Flags of `tok serve` and `tok chat`, and their conversion to an engine configuration and server settings."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from pathlib import Path
from typing import get_args

import msgspec

from tok_core import EngineConfig
from tok_core.config import AdmissionName, BackendName, Device, DType, GenerationConfig, KVCacheDType, LoadFormat
from tok_server.flags.server_flags import add_formats, add_limits, add_server, make_settings
from tok_server.settings import Settings

DEMO_NAME = "tok-demo"
DEMO_MODEL = Path(__file__).parent.parent / "demo" / "model"

TOK_EXAMPLES = """examples:
  tok serve                              serve the small demo model at http://127.0.0.1:10210
  tok serve Qwen/Qwen2.5-0.5B-Instruct   serve a model from the Hugging Face hub
  tok chat                               chat with the demo model in this terminal
  tok COMMAND --help                     show the flags of a command
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

commands in the chat: /reset, /system TEXT, /save FILE, /help, /exit
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


def model_and_name(model: str | None) -> tuple[str, str]:
    """Return the model that the engine loads, and the name under which it is served."""
    if model is None:
        return str(DEMO_MODEL), DEMO_NAME
    directory = Path(model).expanduser()
    return model, directory.resolve().name if directory.is_dir() else model


def add_serve(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tok serve`."""
    _add_model(parser, "serve")
    server = parser.add_argument_group("server")
    add_server(server)
    server.add_argument(
        "--data-dir",
        metavar="DIR",
        help="directory for models, files and batches (default: models in the Hugging Face cache, no batches)",
    )
    add_formats(server)
    add_limits(parser.add_argument_group("limits"))
    _add_engine(parser.add_argument_group("engine"))


def add_engine_flags(group: argparse._ActionsContainer, names: Collection[str] = ENGINE_FLAGS, **help: str) -> None:
    """Add the engine flags of `tok serve` that are in `names`, with the help texts in `help` replacing its own.

    The flags are for commands that serve nothing, so the help of `data_dir` mentions models only.
    """
    texts = {"data_dir": "directory for downloaded models (default: Hugging Face cache)", **help}
    serve = argparse.ArgumentParser(add_help=False)
    add_serve(serve)
    for action in serve._actions:
        if action.dest in names:
            action.help = texts.get(action.dest, action.help)
            group._add_action(action)


def _add_engine(group: argparse._ActionsContainer) -> None:
    _add_device(group)
    text = "kernels to use; auto: the fastest measured on a GPU, plain PyTorch (reference) on a CPU"
    _choice(group, "backend", BackendName, text)
    text = "auto: load the checkpoint; dummy: random weights, to measure speed without one"
    _choice(group, "load_format", LoadFormat, text)
    text = "defaults of sampling parameters; auto: from generation_config.json; none: temperature 1, no filters"
    _choice(group, "generation_config", GenerationConfig, text)
    group.add_argument(
        "--ignore-config-keys",
        type=lambda text: tuple(text.split(",")),
        metavar="KEY,…",
        help="unknown keys of the model's config.json to ignore, separated by commas (default: none)",
    )
    text = "dtype of the KV cache; auto: that of --dtype; fp8: one byte per element, less exact"
    _choice(group, "kv_cache_dtype", KVCacheDType, text)
    _number(group, "page_size", "tokens per page of the KV cache, a power of two")
    _number(group, "kv_cache_tokens", "capacity of the KV cache in tokens", unset="as many as fit in memory")
    _number(
        group,
        "gpu_memory_fraction",
        "share of GPU memory for weights, KV cache and activations",
        kind=float,
        metavar="F",
    )
    _number(group, "max_running", "maximum number of samples running at once", unset="8192 on a GPU, 256 on a CPU")
    _number(group, "max_step_tokens", "maximum number of tokens per forward pass", unset="8192 on a GPU, 1024 on a CPU")
    text = "maximum number of tokens of prompt and output together"
    _number(group, "max_model_len", text, unset="what model and KV cache allow")
    _number(group, "dp", "data-parallel replicas; each uses --tp × --pp devices")
    _number(group, "tp", "tensor-parallel ranks; each layer is sharded over them")
    _number(group, "pp", "pipeline stages; the layers are divided among them")
    group.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="Ray cluster to place the replicas on: auto, or HOST:PORT of its head (default: none)",
    )
    _number(
        group,
        "async_tp_threshold",
        "tokens per step from which GEMMs overlap with TP collectives; 0: never",
        unset="measured",
    )
    _disable_flag(group, "prefix_groups", "disable cascade attention: each sequence reads its shared prefix separately")
    text = "admit waiting samples by predicted page use (forecast) or by pages free now (watermark)"
    _choice(group, "admission", AdmissionName, text)
    _disable_flag(group, "cuda_graphs", "launch kernels one by one instead of replaying decode steps as CUDA graphs")
    _number(group, "run_ahead", "maximum number of steps queued at the worker", unset="enough to keep it busy")
    _number(group, "seed", "seed of the random weights of --load-format dummy")
    _number(
        group,
        "eos_probability",
        "with --load-format dummy: probability that a token ends its sample, at temperature 0.6",
        kind=float,
        metavar="P",
        unset="as for any id",
    )
    text = "seconds without a finished step or process progress after which a replica is restarted"
    _number(group, "step_timeout", text, kind=float, metavar="S")
    text = "seconds without progress after which the start of a replica fails"
    _number(group, "start_timeout", text, kind=float, metavar="S")
    _number(group, "max_restarts", "maximum number of restarts of a failed replica within --restart-window")
    _number(group, "restart_window", "seconds in which restarts count towards --max-restarts", kind=float, metavar="S")


def add_chat(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tok chat`."""
    _add_model(parser, "chat with")
    parser.add_argument("--url", help="base URL of a server to chat with, instead of loading a model")
    parser.add_argument("--api-key", metavar="KEY", help="API key of the server, with --url")
    parser.add_argument("--system", metavar="TEXT", help="system prompt of the conversation")
    text = f"sampling temperature; 0: greedy (default: the server's, or the model's, or {CHAT_TEMPERATURE})"
    parser.add_argument("--temperature", type=float, metavar="T", help=text)
    parser.add_argument("--max-tokens", type=int, metavar="N", help="maximum number of tokens per answer")
    _add_device(parser.add_argument_group("engine, without --url"))


def _add_model(parser: argparse.ArgumentParser, verb: str) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help=f"model to {verb}: a directory or a Hugging Face hub id (default: the demo model)",
    )


def _add_device(group: argparse._ActionsContainer) -> None:
    _choice(group, "device", Device, "device to run on; auto: the GPU if there is one, else the CPU")
    _choice(group, "dtype", DType, "dtype of weights and activations; auto: bfloat16 on a GPU, float32 on a CPU")


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
    help_text = f"{text} (default: {unset or f'{default:g}'})"
    group.add_argument(_flag(field), type=kind, default=default, metavar=metavar, help=help_text)


def _disable_flag(group: argparse._ActionsContainer, field: str, text: str) -> None:
    group.add_argument(f"--no-{field.replace('_', '-')}", dest=field, action="store_false", help=text)


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """Return the engine configuration from the flags of a command that loads a model. Errors: InvalidField."""
    model, _ = model_and_name(options.model)
    engine_options = {name: getattr(options, name) for name in ENGINE_FLAGS if hasattr(options, name)}
    return EngineConfig(model=model, **engine_options)


def server_settings(options: argparse.Namespace) -> Settings:
    """Return the server settings from the flags of `tok serve`. Errors: InvalidField."""
    _, name = model_and_name(options.model)
    return make_settings(options, name)
