"""Serve /v1/completions."""

from __future__ import annotations

from tok_server.openai.completions.endpoint import MAX_LOOP_PROMPT_BYTES
from tok_server.openai.completions.form import CompletionForm
from tok_server.openai.completions.prompts import numbered, tokenised

__all__ = [
    "MAX_LOOP_PROMPT_BYTES",
    "CompletionForm",
    "numbered",
    "tokenised",
]
