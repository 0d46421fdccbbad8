"""Serve the OpenAI API: completions, chats, responses, embeddings, scores, tokenisation, models."""

from __future__ import annotations

from tok_server.openai import embeddings, models, scores, tokenise_endpoints
from tok_server.openai.chat import endpoint as chat_endpoint
from tok_server.openai.chat import make_chat_job
from tok_server.openai.completions import endpoint as completions_endpoint
from tok_server.openai.endpoints import BACKGROUND_PRIORITY, ENDPOINTS, MAX_RELATIVE_PRIORITY, EndpointTask, ServedModel
from tok_server.openai.generation import (
    OTHER_SERVERS,
    STREAM_HEADERS,
    GenerationJob,
    NeutralValues,
    UnsupportedFields,
    answer_request,
    event,
    ignored_header,
    parse_request,
    total_usage,
    value_or_none,
)
from tok_server.openai.responses import endpoint as responses_endpoint

__all__ = [
    "BACKGROUND_PRIORITY",
    "ENDPOINTS",
    "MAX_RELATIVE_PRIORITY",
    "OPENAI_OPERATIONS",
    "OTHER_SERVERS",
    "STREAM_HEADERS",
    "EndpointTask",
    "GenerationJob",
    "NeutralValues",
    "ServedModel",
    "UnsupportedFields",
    "answer_request",
    "event",
    "ignored_header",
    "make_chat_job",
    "parse_request",
    "total_usage",
    "value_or_none",
]

OPENAI_OPERATIONS = (
    *completions_endpoint.OPERATIONS,
    *chat_endpoint.OPERATIONS,
    *responses_endpoint.OPERATIONS,
    *embeddings.OPERATIONS,
    *scores.OPERATIONS,
    *tokenise_endpoints.OPERATIONS,
    *models.OPERATIONS,
)
