"""Keyword parameters of `create`, under their names in the API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Required, TypedDict

from tok_client.requests.bodies import Object
from tok_client.types import (
    ChatMessage,
    ExpiresAfter,
    InputItem,
    Maybe,
    Message,
    OutputItem,
    ResponseFormat,
    ResponseReasoning,
    ResponseStreamOptions,
    ResponseText,
    ResponseTool,
    ResponseToolChoice,
    StopWhen,
    StreamOptions,
    StructuredOutputs,
    Tool,
    ToolChoice,
)

Prompt = str | Sequence[int]
"""One prompt: a text, or the ids of its tokens."""

Prompts = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
"""A prompt, or several of one kind."""

Messages = Sequence[Message | ChatMessage | Object]
"""A conversation."""

Conversation = str | Messages
"""A conversation; a text is one user message."""


class CallParams(TypedDict, total=False):
    """Parameters of a call that are not fields of the request."""

    timeout: float | None
    extra_body: Object | None


class GenerationParams(TypedDict, total=False):
    """Parameters of both completion endpoints; see `tok_client.types.GenerationRequest`."""

    model: Required[str]
    max_tokens: Maybe[int]
    temperature: Maybe[float]
    top_p: Maybe[float]
    n: Maybe[int]
    stream_options: Maybe[StreamOptions | Object]
    stop: Maybe[str | Sequence[str]]
    presence_penalty: Maybe[float]
    frequency_penalty: Maybe[float]
    logit_bias: Maybe[Mapping[str, float] | Mapping[int, float]]
    user: Maybe[str]
    seed: Maybe[int]
    top_k: Maybe[int]
    min_p: Maybe[float]
    repetition_penalty: Maybe[float]
    min_tokens: Maybe[int]
    ignore_eos: Maybe[bool]
    priority: Maybe[int]
    cache_salt: Maybe[str]
    stop_token_ids: Maybe[Sequence[int]]
    allowed_token_ids: Maybe[Sequence[int]]
    bad_words: Maybe[Sequence[str]]
    include_stop_str_in_output: Maybe[bool]
    skip_special_tokens: Maybe[bool]
    add_special_tokens: Maybe[bool]
    truncate_prompt_tokens: Maybe[int]
    return_token_ids: Maybe[bool]
    return_tokens_as_token_ids: Maybe[bool]
    prompt_logprobs: Maybe[int]
    response_format: Maybe[ResponseFormat | Object]
    structured_outputs: Maybe[StructuredOutputs | Object]
    guided_json: Maybe[Object | str]
    guided_regex: Maybe[str]
    guided_choice: Maybe[Sequence[str]]
    guided_grammar: Maybe[str]
    guided_json_object: Maybe[bool]
    stop_when: Maybe[StopWhen | Object]


class CompletionOptions(GenerationParams, total=False):
    """Parameters of `completions.create` except its prompts; see `tok_client.types.CompletionRequest`."""

    logprobs: Maybe[int]
    echo: Maybe[bool]
    best_of: Maybe[int]
    suffix: Maybe[str]


class CompletionParams(CompletionOptions, total=False):
    """Parameters of `completions.create`."""

    prompt: Required[Prompts]


class CompletionCreateParams(CompletionParams, CallParams, total=False):
    """Keyword parameters of `completions.create` beside `stream`."""


class ChatCompletionOptions(GenerationParams, total=False):
    """Parameters of `chat.completions.create` except its messages; see `tok_client.types.ChatCompletionRequest`."""

    logprobs: Maybe[bool]
    top_logprobs: Maybe[int]
    max_completion_tokens: Maybe[int]
    tools: Maybe[Sequence[Tool | Object]]
    tool_choice: Maybe[ToolChoice | Object]
    parallel_tool_calls: Maybe[bool]
    functions: Maybe[Sequence[Object]]
    function_call: Maybe[str | Object]
    modalities: Maybe[Sequence[Literal["text", "audio"]]]
    audio: Maybe[Object]
    prediction: Maybe[Object]
    reasoning_effort: Maybe[Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]]
    verbosity: Maybe[Literal["low", "medium", "high"]]
    web_search_options: Maybe[Object]
    moderation: Maybe[Object]
    store: Maybe[bool]
    metadata: Maybe[Mapping[str, str]]
    service_tier: Maybe[Literal["auto", "default", "flex", "scale", "priority", "fast"]]
    safety_identifier: Maybe[str]
    prompt_cache_key: Maybe[str]
    prompt_cache_retention: Maybe[Literal["in_memory", "in-memory", "24h"]]
    prompt_cache_options: Maybe[Object]
    chat_template_kwargs: Maybe[Object]
    add_generation_prompt: Maybe[bool]
    continue_final_message: Maybe[bool]
    chat_template: Maybe[str]


class ChatCompletionParams(ChatCompletionOptions, total=False):
    """Parameters of `chat.completions.create`."""

    messages: Required[Messages]


class ChatCompletionCreateParams(ChatCompletionParams, CallParams, total=False):
    """Keyword parameters of `chat.completions.create` beside `stream`."""


class ResponseParams(TypedDict, total=False):
    """Parameters of `responses.create`; see `tok_client.types.ResponseRequest`. Output items are valid input."""

    input: Required[str | Sequence[InputItem | OutputItem | Object]]
    model: Maybe[str]
    instructions: Maybe[str]
    max_output_tokens: Maybe[int]
    temperature: Maybe[float]
    top_p: Maybe[float]
    text: Maybe[ResponseText | Object]
    reasoning: Maybe[ResponseReasoning | Object]
    tools: Maybe[Sequence[ResponseTool | Object]]
    tool_choice: Maybe[Literal["none", "auto", "required"] | ResponseToolChoice | Object]
    parallel_tool_calls: Maybe[bool]
    include: Maybe[Sequence[str]]
    top_logprobs: Maybe[int]
    stream_options: Maybe[ResponseStreamOptions | Object]
    metadata: Maybe[Mapping[str, str]]
    user: Maybe[str]
    safety_identifier: Maybe[str]
    prompt_cache_key: Maybe[str]
    store: Maybe[bool]
    truncation: Maybe[Literal["auto", "disabled"]]
    service_tier: Maybe[Literal["auto", "default", "flex", "scale", "priority", "fast"]]
    previous_response_id: Maybe[str]
    conversation: Maybe[str | Object]
    background: Maybe[bool]
    prompt: Maybe[Object]
    max_tool_calls: Maybe[int]
    context_management: Maybe[Sequence[Object]]
    moderation: Maybe[Object]
    prompt_cache_retention: Maybe[Literal["in_memory", "24h"]]
    prompt_cache_options: Maybe[Object]
    presence_penalty: Maybe[float]
    frequency_penalty: Maybe[float]
    repetition_penalty: Maybe[float]
    top_k: Maybe[int]
    min_p: Maybe[float]
    seed: Maybe[int]
    stop: Maybe[str | Sequence[str]]
    ignore_eos: Maybe[bool]
    priority: Maybe[int]
    cache_salt: Maybe[str]
    structured_outputs: Maybe[StructuredOutputs | Object]
    chat_template_kwargs: Maybe[Object]


class ResponseCreateParams(ResponseParams, CallParams, total=False):
    """Keyword parameters of `responses.create` beside `stream`."""


class EmbeddingParams(TypedDict, total=False):
    """Parameters of `embeddings.create` except its input; see `tok_client.types.EmbeddingRequest`."""

    model: Required[str]
    encoding_format: Maybe[Literal["float", "base64"]]
    dimensions: Maybe[int]
    user: Maybe[str]
    pooling: Maybe[Literal["last", "mean"]]
    cache_salt: Maybe[str]


class TextPairParams(TypedDict, total=False):
    """Parameters that `score` and `rerank` share."""

    model: Maybe[str]
    user: Maybe[str]
    pooling: Maybe[Literal["last", "mean"]]
    cache_salt: Maybe[str]


class ScoreParams(TextPairParams, total=False):
    """Parameters of `score`; see `tok_client.types.ScoreRequest`."""

    text_1: Required[str | list[str]]
    text_2: Required[str | list[str]]


class RerankParams(TextPairParams, total=False):
    """Parameters of `rerank`; see `tok_client.types.RerankRequest`."""

    query: Required[str]
    documents: Required[list[str]]
    top_n: Maybe[int]
    return_documents: Maybe[bool]


class TokenizeParams(TypedDict, total=False):
    """Parameters of `tokenize`: `prompt` or `messages`; see `tok_client.types.TokenizeRequest`."""

    model: Maybe[str]
    prompt: Maybe[str]
    messages: Maybe[Messages]
    tools: Maybe[Sequence[Tool | Object]]
    tool_choice: Maybe[ToolChoice | Object]
    add_special_tokens: Maybe[bool]
    return_token_strs: Maybe[bool]
    add_generation_prompt: Maybe[bool]
    continue_final_message: Maybe[bool]
    chat_template: Maybe[str]
    chat_template_kwargs: Maybe[Object]


class BatchParams(TypedDict, total=False):
    """Parameters of `batches.create`; see `tok_client.types.BatchRequest`. `completion_window` defaults to "24h"."""

    input_file_id: Required[str]
    endpoint: Required[str]
    completion_window: str
    metadata: Maybe[Mapping[str, str]]
    output_expires_after: Maybe[ExpiresAfter | Object]


class TokenGenerationParams(TypedDict, total=False):
    """Parameters of `rl.generate` beside its prompt; see `tok_client.types.TokenGenerationRequest`."""

    request_id: str | None
    cache_salt: str | None
    priority: int | None
    stream_options: Mapping[str, object] | None


class TokenGenerationCreateParams(TokenGenerationParams, total=False):
    """Keyword parameters of `rl.generate` beside `stream`."""

    timeout: float | None
