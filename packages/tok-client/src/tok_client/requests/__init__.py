"""Turn the parameters of an endpoint into a Call."""

from __future__ import annotations

from tok_client.requests.bodies import Object
from tok_client.requests.generation import CHAT, COMPLETION, RESPONSE, Generation
from tok_client.requests.params import (
    BatchParams,
    ChatCompletionOptions,
    ChatCompletionParams,
    CompletionOptions,
    CompletionParams,
    Conversation,
    EmbeddingParams,
    Prompt,
    Prompts,
    ResponseParams,
    TokenizeParams,
)
from tok_client.requests.upload_form import upload

__all__ = [
    "CHAT",
    "COMPLETION",
    "RESPONSE",
    "BatchParams",
    "ChatCompletionOptions",
    "ChatCompletionParams",
    "CompletionOptions",
    "CompletionParams",
    "Conversation",
    "EmbeddingParams",
    "Generation",
    "Object",
    "Prompt",
    "Prompts",
    "ResponseParams",
    "TokenizeParams",
    "upload",
]
