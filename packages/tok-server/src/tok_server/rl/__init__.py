"""Endpoints that trainers call while they change the model: pause, resume, load weights, as vLLM and SGLang have them.

Served only with --enable-rl.
"""

from __future__ import annotations

from tok_server.rl.sglang_endpoints import SGLANG_OPERATIONS
from tok_server.rl.sglang_transfer import SGLANG_TRANSFER_OPERATIONS
from tok_server.rl.vllm_endpoints import VLLM_OPERATIONS
from tok_server.rl.vllm_transfer import VLLM_TRANSFER_OPERATIONS

RL_OPERATIONS = (
    *VLLM_OPERATIONS,
    *VLLM_TRANSFER_OPERATIONS,
    *SGLANG_OPERATIONS,
    *SGLANG_TRANSFER_OPERATIONS,
)

__all__ = ["RL_OPERATIONS"]
