"""Serve /v1/completions."""

from __future__ import annotations

from tok_server.openai.completions.endpoint import MAX_LOOP_PROMPT_BYTES

__all__ = [
    "MAX_LOOP_PROMPT_BYTES",
]
