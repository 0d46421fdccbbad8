"""Turn a request's fields into engine requests, and their outputs into an HTTP answer."""

from __future__ import annotations

from tok_server.openai.generation.answers import (
    MIN_PIECEWISE_BYTES,
    STREAM_HEADERS,
    Parse,
    answer_request,
    estimate_bytes,
    ignored_header,
    request_deadline,
    write_pieces,
)
from tok_server.openai.generation.job import (
    MAX_GRAMMAR_CHECKS,
    MAX_KEPT_LOGPROBS,
    MAX_LOGPROBS,
    MAX_RESPONSE_LOGPROBS,
    GenerationJob,
    SubmittedStreams,
    best_of_params,
    check_grammar,
    check_limits,
)
from tok_server.openai.generation.logprobs import (
    TextOffsets,
    chat_logprobs,
    clamp_logprob,
    completion_logprobs,
    prompt_logprobs,
)
from tok_server.openai.generation.other_servers import OTHER_SERVERS, NeutralValues, UnsupportedFields
from tok_server.openai.generation.params import requested_format, sampling_params, value_or_none
from tok_server.openai.generation.prompts import (
    check_prompt_size,
    has_few_token_ids,
    prompt_field_name,
    tokenise_prompts,
)
from tok_server.openai.generation.request_fields import (
    CHAT,
    COMPLETION,
    RESPONSE,
    cache_salt_of,
    check_model,
    check_prompt_logprobs,
    common_fields,
    parse_request,
)
from tok_server.openai.generation.serializer import AnswerSerializer, ChunkSerializer, TokenTexts, event, total_usage
from tok_server.openai.generation.stop_when import parse_stop_when, stop_when_result, wait_for_output

__all__ = [
    "CHAT",
    "COMPLETION",
    "MAX_GRAMMAR_CHECKS",
    "MAX_KEPT_LOGPROBS",
    "MAX_LOGPROBS",
    "MAX_RESPONSE_LOGPROBS",
    "MIN_PIECEWISE_BYTES",
    "OTHER_SERVERS",
    "RESPONSE",
    "STREAM_HEADERS",
    "AnswerSerializer",
    "ChunkSerializer",
    "GenerationJob",
    "NeutralValues",
    "Parse",
    "SubmittedStreams",
    "TextOffsets",
    "TokenTexts",
    "UnsupportedFields",
    "answer_request",
    "best_of_params",
    "cache_salt_of",
    "chat_logprobs",
    "check_grammar",
    "check_limits",
    "check_model",
    "check_prompt_logprobs",
    "check_prompt_size",
    "clamp_logprob",
    "common_fields",
    "completion_logprobs",
    "estimate_bytes",
    "event",
    "has_few_token_ids",
    "ignored_header",
    "parse_request",
    "parse_stop_when",
    "prompt_field_name",
    "prompt_logprobs",
    "request_deadline",
    "requested_format",
    "sampling_params",
    "stop_when_result",
    "tokenise_prompts",
    "total_usage",
    "value_or_none",
    "wait_for_output",
    "write_pieces",
]
