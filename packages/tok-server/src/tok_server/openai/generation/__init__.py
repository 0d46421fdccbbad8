"""Turn a request's fields into engine requests, and their outputs into an HTTP answer."""

from __future__ import annotations

from tok_server.openai.generation.answers import (
    MAX_KEPT_LOGPROBS,
    MAX_RESPONSE_LOGPROBS,
    MIN_PIECEWISE_BYTES,
    STREAM_HEADERS,
    Form,
    answer,
    check_logprobs,
    check_priority,
    check_sample_count,
    event,
    ignored_header,
    in_time,
    size_of,
    write_pieces,
)
from tok_server.openai.generation.chunk_form import ChunkForm
from tok_server.openai.generation.job import Job, best_of_params, renamed
from tok_server.openai.generation.logprobs import (
    Offsets,
    TokenTexts,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)
from tok_server.openai.generation.params import given, sampling_params
from tok_server.openai.generation.request_fields import (
    cache_salt_of,
    check_model,
    check_prompt_logprobs,
    read,
    wants_continuous_usage,
    wants_usage,
)
from tok_server.openai.generation.response_format import structure_of
from tok_server.openai.generation.sample_reader import SampleReader
from tok_server.openai.generation.stop_when import rule_of
from tok_server.openai.generation.streams import check_grammar, submitted
from tok_server.openai.generation.token_usage import running_usage, usage
from tok_server.openai.generation.unsupported_fields import CHAT, COMPLETION, RESPONSE

__all__ = [
    "CHAT",
    "COMPLETION",
    "MAX_KEPT_LOGPROBS",
    "MAX_RESPONSE_LOGPROBS",
    "MIN_PIECEWISE_BYTES",
    "RESPONSE",
    "STREAM_HEADERS",
    "ChunkForm",
    "Form",
    "Job",
    "Offsets",
    "SampleReader",
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
    "event",
    "given",
    "ignored_header",
    "in_time",
    "prompt_logprobs",
    "read",
    "renamed",
    "rule_of",
    "running_usage",
    "sampling_params",
    "size_of",
    "structure_of",
    "submitted",
    "usage",
    "wants_continuous_usage",
    "wants_usage",
    "write_pieces",
]
