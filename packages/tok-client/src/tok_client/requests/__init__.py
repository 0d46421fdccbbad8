"""Parameters of the endpoints, and the calls made of them."""

from __future__ import annotations

from tok_client.requests.bodies import Object
from tok_client.requests.generation import CHAT, COMPLETION, RESPONSE, Generation
from tok_client.requests.params import (
    BatchParams,
    ChatCompletionCreateParams,
    ChatCompletionOptions,
    ChatCompletionParams,
    CompletionCreateParams,
    CompletionOptions,
    CompletionParams,
    Conversation,
    EmbeddingParams,
    Prompt,
    Prompts,
    RerankParams,
    ResponseCreateParams,
    ResponseParams,
    ScoreParams,
    TokenGenerationCreateParams,
    TokenGenerationParams,
    TokenizeParams,
)

__all__ = [
    "CHAT",
    "COMPLETION",
    "RESPONSE",
    "BatchParams",
    "ChatCompletionCreateParams",
    "ChatCompletionOptions",
    "ChatCompletionParams",
    "CompletionCreateParams",
    "CompletionOptions",
    "CompletionParams",
    "Conversation",
    "EmbeddingParams",
    "Generation",
    "Object",
    "Prompt",
    "Prompts",
    "RerankParams",
    "ResponseCreateParams",
    "ResponseParams",
    "ScoreParams",
    "TokenGenerationCreateParams",
    "TokenGenerationParams",
    "TokenizeParams",
]
