"""Turn a request's fields into engine requests, and their outputs into an HTTP answer."""

from __future__ import annotations

from tok_server.openai.generation.answers import (
    MAX_KEPT_LOGPROBS,
    MAX_RESPONSE_LOGPROBS,
    MIN_PIECEWISE_BYTES,
    STREAM_HEADERS,
    AnswerSerializer,
    answer,
    check_logprobs,
    check_priority,
    check_sample_count,
    estimate_bytes,
    event,
    ignored_header,
    request_deadline,
    write_pieces,
)
from tok_server.openai.generation.chunk_serializer import ChunkSerializer
from tok_server.openai.generation.job import GenerationJob, best_of_params, invalid_field
from tok_server.openai.generation.logprobs import (
    TextOffsets,
    TokenTexts,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)
from tok_server.openai.generation.params import sampling_params, value_or_none
from tok_server.openai.generation.request_fields import (
    cache_salt_of,
    check_model,
    check_prompt_logprobs,
    parse_request,
    wants_continuous_usage,
    wants_usage,
)
from tok_server.openai.generation.response_format import requested_format
from tok_server.openai.generation.sample_reader import SampleReader
from tok_server.openai.generation.stop_when import parse_stop_when
from tok_server.openai.generation.streams import SubmittedStreams, check_grammar
from tok_server.openai.generation.token_usage import running_usage, total_usage
from tok_server.openai.generation.unsupported_fields import CHAT, COMPLETION, RESPONSE

__all__ = [
    "CHAT",
    "COMPLETION",
    "MAX_KEPT_LOGPROBS",
    "MAX_RESPONSE_LOGPROBS",
    "MIN_PIECEWISE_BYTES",
    "RESPONSE",
    "STREAM_HEADERS",
    "AnswerSerializer",
    "ChunkSerializer",
    "GenerationJob",
    "SampleReader",
    "SubmittedStreams",
    "TextOffsets",
    "TokenTexts",
    "answer",
    "best_of_params",
    "cache_salt_of",
    "chat_logprobs",
    "check_grammar",
    "check_logprobs",
    "check_model",
    "check_priority",
    "check_prompt_logprobs",
    "check_sample_count",
    "completion_logprobs",
    "estimate_bytes",
    "event",
    "ignored_header",
    "invalid_field",
    "parse_request",
    "parse_stop_when",
    "prompt_logprobs",
    "request_deadline",
    "requested_format",
    "running_usage",
    "sampling_params",
    "total_usage",
    "value_or_none",
    "wants_continuous_usage",
    "wants_usage",
    "write_pieces",
]
