"""Flags of `tok serve` and `tok chat`, and their conversion to an engine configuration and server settings."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from pathlib import Path

from tok_core import EngineConfig
from tok_server.flags.server_flags import LIMITS, add_field_flags, add_formats, add_server, make_settings
from tok_server.flags.vllm_flags import add_vllm_flags
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

ENGINE_TEXTS = {
    "revision": ("REVISION", "branch, tag or commit of a hub id (default: its main branch)"),
    "tokenizer": ("DIR", "directory or hub id of another tokenizer, with its chat template (default: the model's)"),
    "chat_template": ("FILE", "file with a chat template in Jinja, or its text (default: the tokenizer's)"),
    "cache_dir": (
        "DIR",
        "directory for compiled kernels and measured choices, on a GPU, such as tok warm writes (default: in the home "
        "directory, one for each library)",
    ),
    "device": ("", "device to run on; auto: the GPU if there is one, else the CPU"),
    "dtype": ("", "dtype of weights and activations; auto: bfloat16 on a GPU, float32 on a CPU"),
    "backend": ("", "kernels to use; auto: the fastest measured on a GPU, plain PyTorch (reference) on a CPU"),
    "load_format": ("", "auto: load the checkpoint; dummy: random weights, to measure speed without one"),
    "quantization": (
        "",
        "auto: load the checkpoint as it is; fp8, int8: round a dense model's linear layers while loading; fp8 and the "
        "other words: only for a checkpoint of this format",
    ),
    "generation_config": (
        "",
        "defaults of sampling parameters; auto: from generation_config.json; none: temperature 1, no filters",
    ),
    "logprobs_mode": (
        "",
        "logprobs of samples: raw_logprobs: before temperature, penalties and filters; processed_logprobs: after them",
    ),
    "ignore_config_keys": (
        "KEY,…",
        "unknown keys of the model's config.json to ignore, separated by commas (default: none)",
    ),
    "kv_cache_dtype": (
        "",
        "dtype of the KV cache; fp8: one byte per element, with scales of the checkpoint or measured at the start; "
        "fp8_unscaled: without scales; int8: one byte per element, with scales of each token; unquantized: that of "
        "--dtype; auto: fp8 if the checkpoint has scales, else unquantized",
    ),
    "page_size": ("N", "tokens per page of the KV cache, a power of two"),
    "kv_cache_tokens": ("N", "capacity of the KV cache in tokens (default: as many as fit in memory)"),
    "gpu_memory_fraction": ("F", "share of GPU memory for weights, KV cache and activations"),
    "max_running": ("N", "maximum number of samples running at once (default: 8192 on a GPU, 256 on a CPU)"),
    "max_step_tokens": ("N", "maximum number of tokens per forward pass (default: 8192 on a GPU, 1024 on a CPU)"),
    "max_model_len": (
        "N",
        "maximum number of tokens of prompt and output together (default: what model and KV cache allow)",
    ),
    "dp": ("N", "data-parallel replicas; each uses --tp × --pp devices"),
    "tp": ("N", "tensor-parallel ranks; each layer is sharded over them"),
    "pp": ("N", "pipeline stages; the layers are divided among them"),
    "ep": ("", "expert parallelism: each of the --tp ranks holds some experts of a mixture, instead of a part of each"),
    "redundant_experts": ("N", "with --ep: copies in each layer of the experts with most tokens, held by other ranks"),
    "expert_rebalance_steps": ("N", "with --redundant-experts: steps after which copies are chosen anew; 0: never"),
    "ray": ("ADDRESS", "Ray cluster to place the replicas on: auto, or HOST:PORT of its head (default: none)"),
    "async_tp_threshold": (
        "N",
        "tokens per step from which GEMMs overlap with TP collectives; 0: never (default: measured)",
    ),
    "batch_invariant": (
        "",
        "compute the same tokens and log-probabilities, bit for bit, whatever else runs (CPUs and Hopper GPUs; slower)",
    ),
    "prefix_groups": ("", "disable cascade attention: each sequence reads its shared prefix separately"),
    "admission": ("", "admit waiting samples by predicted page use (forecast) or by pages free now (watermark)"),
    "cuda_graphs": ("", "launch kernels one by one instead of replaying decode steps as CUDA graphs"),
    "enable_sleep_mode": ("", "allow /sleep: weights and KV cache live in memory that can be given back to the system"),
    "run_ahead": ("N", "maximum number of steps queued at the worker (default: enough to keep it busy)"),
    "speculate": (
        "off|auto|N",
        "draft tokens from prompts and earlier samples; auto: as many as make steps faster by measurement; N: at most "
        "N per sample and step",
    ),
    "draft": (
        "MODEL",
        "with --speculate, without --pp: directory or hub id of a small model with the same tokens, or of an EAGLE-3 "
        "head for the model, which drafts what texts so far do not predict (default: none)",
    ),
    "seed": ("N", "seed of the random weights of --load-format dummy"),
    "eos_probability": (
        "P",
        "with --load-format dummy: probability that a token ends its sample, at temperature 0.6 "
        "(default: as for any id)",
    ),
    "markov_probability": (
        "P",
        "with --load-format dummy: probability that a token is followed by its successor, at temperature 0.6, for "
        "measuring --speculate (default: tokens follow each other by chance)",
    ),
    "moe_skew": (
        "S",
        "with --load-format dummy: tokens choose experts by a Zipf law with exponent S; 0: evenly",
    ),
    "step_timeout": ("S", "seconds without a finished step or process progress after which a replica is restarted"),
    "start_timeout": ("S", "seconds without progress after which the start of a replica fails"),
    "max_restarts": ("N", "maximum number of restarts of a failed replica within --restart-window"),
    "restart_window": ("S", "seconds in which restarts count towards --max-restarts"),
}
"""Field of `EngineConfig` -> metavar and help of its flag."""
ENGINE_FLAGS = ("data_dir", *ENGINE_TEXTS)
CHAT_TEMPERATURE = 0.7


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
        help="directory for models, files and batches (default: models in the Hugging Face cache, files and batches in "
        "the user's data directory)",
    )
    server.add_argument("--no-batches", dest="batches", action="store_false", help="keep no files and batches")
    add_formats(server)
    add_field_flags(parser.add_argument_group("limits"), Settings, LIMITS)
    add_field_flags(parser.add_argument_group("engine"), EngineConfig, ENGINE_TEXTS)
    add_vllm_flags(parser)


def add_engine_flags(group: argparse._ActionsContainer, names: Collection[str] = ENGINE_FLAGS, **help: str) -> None:
    """Add the engine flags of `tok serve` that are in `names`, with the help texts in `help` replacing its own.

    The flags are for commands that serve nothing, so the help of `data_dir` mentions models only.
    """
    texts = {"data_dir": "directory for downloaded models (default: Hugging Face cache)", **help}
    serve = argparse.ArgumentParser(add_help=False)
    add_serve(serve)
    for action in serve._actions:
        if action.dest in names and action.default is not argparse.SUPPRESS:  # not another name by vLLM
            action.help = texts.get(action.dest, action.help)
            group._add_action(action)


def add_chat(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `tok chat`."""
    _add_model(parser, "chat with")
    parser.add_argument("--url", help="URL of a server to chat with, with or without /v1, instead of loading a model")
    parser.add_argument("--api-key", metavar="KEY", help="API key of the server, with --url")
    parser.add_argument("--system", metavar="TEXT", help="system prompt of the conversation")
    text = f"sampling temperature; 0: greedy (default: the server's, or the model's, or {CHAT_TEMPERATURE})"
    parser.add_argument("--temperature", type=float, metavar="T", help=text)
    parser.add_argument("--max-tokens", type=int, metavar="N", help="maximum number of tokens per answer")
    texts = {name: ENGINE_TEXTS[name] for name in ("device", "dtype")}
    add_field_flags(parser.add_argument_group("engine, without --url"), EngineConfig, texts)


def _add_model(parser: argparse.ArgumentParser, verb: str) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help=f"model to {verb}: a directory or a Hugging Face hub id (default: the demo model)",
    )


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """Return the engine configuration from the flags of a command that loads a model. Errors: InvalidField."""
    model, _ = model_and_name(options.model)
    engine_options = {name: getattr(options, name) for name in ENGINE_FLAGS if hasattr(options, name)}
    return EngineConfig(model=model, **engine_options)


def server_settings(options: argparse.Namespace) -> Settings:
    """Return the server settings from the flags of `tok serve`. Errors: InvalidField."""
    _, name = model_and_name(options.model)
    return make_settings(options, name)
