"""Serve /v1/completions."""

from __future__ import annotations

from tok_server.openai.completions.endpoint import MAX_LOOP_PROMPT_BYTES
from tok_server.openai.completions.serializer import CompletionSerializer

__all__ = [
    "MAX_LOOP_PROMPT_BYTES",
    "CompletionSerializer",
]
