"""Endpoints for trainers, compatible with vLLM and SGLang; served only with --enable-rl.

They generate from token ids, pause and resume the engine, update its weights, and let it sleep and wake up.
"""

from __future__ import annotations

from tok_server.rl.sglang_endpoints import SGLANG_OPERATIONS
from tok_server.rl.sglang_generation import SGLANG_GENERATION
from tok_server.rl.sglang_transfer import SGLANG_TRANSFER_OPERATIONS
from tok_server.rl.sleep_endpoints import SLEEP_OPERATIONS
from tok_server.rl.vllm_endpoints import VLLM_OPERATIONS
from tok_server.rl.vllm_generation import VLLM_GENERATION
from tok_server.rl.vllm_transfer import VLLM_TRANSFER_OPERATIONS

RL_OPERATIONS = (
    *VLLM_GENERATION,
    *SGLANG_GENERATION,
    *VLLM_OPERATIONS,
    *VLLM_TRANSFER_OPERATIONS,
    *SGLANG_OPERATIONS,
    *SGLANG_TRANSFER_OPERATIONS,
    *SLEEP_OPERATIONS,
)

__all__ = ["RL_OPERATIONS"]
