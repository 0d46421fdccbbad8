"""Flags of the commands, and their conversion to configurations."""

from __future__ import annotations

from tok_server.flags.command_flags import (
    BATCH_EXAMPLES,
    BENCH_EXAMPLES,
    KERNELS_EXAMPLES,
    QUANTIZE_EXAMPLES,
    SIZES,
    WARM_EXAMPLES,
    add_batch,
    add_bench_kernels,
    add_kernels,
    add_quantize,
    add_warm,
)
from tok_server.flags.engine_flags import (
    CHAT_EXAMPLES,
    CHAT_TEMPERATURE,
    DEMO_MODEL,
    DEMO_NAME,
    ENGINE_FLAGS,
    MODELS_EXAMPLES,
    SERVE_EXAMPLES,
    TOK_EXAMPLES,
    add_chat,
    add_engine_flags,
    add_serve,
    engine_config,
    model_and_name,
    server_settings,
)
from tok_server.flags.server_flags import formats_of

__all__ = [
    "BATCH_EXAMPLES",
    "BENCH_EXAMPLES",
    "CHAT_EXAMPLES",
    "CHAT_TEMPERATURE",
    "DEMO_MODEL",
    "DEMO_NAME",
    "ENGINE_FLAGS",
    "KERNELS_EXAMPLES",
    "MODELS_EXAMPLES",
    "QUANTIZE_EXAMPLES",
    "SERVE_EXAMPLES",
    "SIZES",
    "TOK_EXAMPLES",
    "WARM_EXAMPLES",
    "add_batch",
    "add_bench_kernels",
    "add_chat",
    "add_engine_flags",
    "add_kernels",
    "add_quantize",
    "add_serve",
    "add_warm",
    "engine_config",
    "formats_of",
    "model_and_name",
    "server_settings",
]
