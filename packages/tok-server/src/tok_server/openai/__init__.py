"""Serve the OpenAI API: completions, chats, responses, embeddings, scores, tokenisation, models."""

from __future__ import annotations

from tok_server.openai import embeddings, models, scores, tokenise_endpoints
from tok_server.openai.chat import endpoint as chat_endpoint
from tok_server.openai.chat import make_chat_job
from tok_server.openai.completions import endpoint as completions_endpoint
from tok_server.openai.endpoints import BACKGROUND_PRIORITY, ENDPOINTS, MAX_RELATIVE_PRIORITY, EndpointTask, ServedModel
from tok_server.openai.generation import (
    DONE,
    MAX_GRAMMAR_CHECKS,
    MAX_LOGPROBS,
    MAX_RESPONSE_LOGPROBS,
    OTHER_SERVERS,
    STREAM_HEADERS,
    EventSerializer,
    GenerationJob,
    NeutralValues,
    SubmittedStreams,
    TokenTexts,
    UnsupportedFields,
    answer_request,
    chat_logprobs,
    check_grammar,
    check_limits,
    check_model,
    clamp_logprob,
    event,
    ignored_header,
    parse_request,
    prompt_logprobs,
    request_deadline,
    required,
    running_usage,
    send_events,
    tokenise_prompts,
    total_usage,
    value_or_none,
)
from tok_server.openai.responses import endpoint as responses_endpoint

__all__ = [
    "BACKGROUND_PRIORITY",
    "DONE",
    "ENDPOINTS",
    "MAX_GRAMMAR_CHECKS",
    "MAX_LOGPROBS",
    "MAX_RELATIVE_PRIORITY",
    "MAX_RESPONSE_LOGPROBS",
    "OPENAI_OPERATIONS",
    "OTHER_SERVERS",
    "STREAM_HEADERS",
    "EndpointTask",
    "EventSerializer",
    "GenerationJob",
    "NeutralValues",
    "ServedModel",
    "SubmittedStreams",
    "TokenTexts",
    "UnsupportedFields",
    "answer_request",
    "chat_logprobs",
    "check_echo_size",
    "check_grammar",
    "check_limits",
    "check_model",
    "clamp_logprob",
    "event",
    "ignored_header",
    "make_chat_job",
    "parse_completion",
    "parse_request",
    "prompt_logprobs",
    "request_deadline",
    "required",
    "running_usage",
    "send_events",
    "tokenise_prompts",
    "total_usage",
    "value_or_none",
]

parse_completion, check_echo_size = completions_endpoint.parse, completions_endpoint.check_echo_size

OPENAI_OPERATIONS = (
    *completions_endpoint.OPERATIONS,
    *chat_endpoint.OPERATIONS,
    *responses_endpoint.OPERATIONS,
    *embeddings.OPERATIONS,
    *scores.OPERATIONS,
    *tokenise_endpoints.OPERATIONS,
    *models.OPERATIONS,
)
