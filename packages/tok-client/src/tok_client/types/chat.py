"""The chat completion request, its answer, and the chunks of a streamed answer."""

from __future__ import annotations

from typing import Literal

from msgspec import field

from tok_client.types.base import UNSET, JSONObject, Maybe, Wire
from tok_client.types.chat_messages import CustomToolCall, FunctionCall, FunctionToolCall, Message, Tool, ToolChoice
from tok_client.types.generation import GenerationRequest, PromptLogprobs, StopWhenResult, Usage


class ChatCompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """Body of `POST /chat/completions`.

    logprobs               requests each token's log-probability
    top_logprobs           k: adds those of the k most likely tokens
    max_completion_tokens  newer name of `max_tokens`

    Fields that a text engine does not use are declared loosely: their objects are not validated.

    Beyond OpenAI's reference:

    chat_template_kwargs    variables for the model's chat template (enable_thinking)
    add_generation_prompt   false: the prompt ends without the beginning of an answer
    continue_final_message  the answer continues the last message, which is the assistant's
    chat_template           Jinja source to render the messages with instead of the model's own template; servers take
                            it only if started to trust it

    ValueError (when decoding: msgspec.ValidationError): `messages` is empty.
    """

    messages: list[Message]
    logprobs: Maybe[bool] = UNSET
    top_logprobs: Maybe[int] = UNSET
    max_completion_tokens: Maybe[int] = UNSET

    tools: Maybe[list[Tool]] = UNSET
    tool_choice: Maybe[ToolChoice] = UNSET
    parallel_tool_calls: Maybe[bool] = UNSET
    functions: Maybe[list[JSONObject]] = UNSET
    function_call: Maybe[str | JSONObject] = UNSET
    modalities: Maybe[list[Literal["text", "audio"]]] = UNSET
    audio: Maybe[JSONObject] = UNSET
    prediction: Maybe[JSONObject] = UNSET
    reasoning_effort: Maybe[Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]] = UNSET
    verbosity: Maybe[Literal["low", "medium", "high"]] = UNSET
    web_search_options: Maybe[JSONObject] = UNSET
    moderation: Maybe[JSONObject] = UNSET
    store: Maybe[bool] = UNSET
    metadata: Maybe[dict[str, str]] = UNSET
    service_tier: Maybe[Literal["auto", "default", "flex", "scale", "priority", "fast"]] = UNSET
    safety_identifier: Maybe[str] = UNSET
    prompt_cache_key: Maybe[str] = UNSET
    prompt_cache_retention: Maybe[Literal["in_memory", "in-memory", "24h"]] = UNSET
    prompt_cache_options: Maybe[JSONObject] = UNSET

    chat_template_kwargs: Maybe[JSONObject] = UNSET
    add_generation_prompt: Maybe[bool] = UNSET
    continue_final_message: Maybe[bool] = UNSET
    chat_template: Maybe[str] = UNSET

    def __post_init__(self) -> None:
        if not self.messages:
            raise ValueError("messages is []; allowed: at least one message")


class TopLogprob(Wire, frozen=True, kw_only=True):
    """One of the most likely tokens. −inf is sent as −9999.0, because JSON has no infinity."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class ChatTokenLogprob(Wire, frozen=True, kw_only=True):
    """One token: text, log-probability (natural), bytes, and the most likely tokens at its position."""

    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[TopLogprob] = field(default_factory=list)


class ChatLogprobs(Wire, frozen=True, kw_only=True):
    """Log-probabilities of the tokens of a choice's content and of its refusal."""

    content: list[ChatTokenLogprob] | None = None
    refusal: list[ChatTokenLogprob] | None = None


class ChatMessage(Wire, frozen=True, kw_only=True):
    """The model's answer. It may be sent back as a message of the next request.

    `reasoning_content` is the reasoning before it, if the server separates the two.
    """

    role: str = "assistant"
    content: str | None = None
    refusal: str | None = None
    reasoning_content: Maybe[str] = UNSET
    tool_calls: Maybe[list[FunctionToolCall | CustomToolCall]] = UNSET
    function_call: Maybe[FunctionCall] = UNSET
    annotations: Maybe[list[JSONObject]] = UNSET
    audio: Maybe[JSONObject] = UNSET


class ChatChoice(Wire, frozen=True, kw_only=True):
    """One sample. `finish_reason` is "stop", "length", "tool_calls" or "stop_when"; other servers send others, too."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: Maybe[list[int]] = UNSET


class ChatCompletion(Wire, frozen=True, kw_only=True):
    """Response of `POST /chat/completions`. `created` is in seconds since 1970.

    `prompt_token_ids`, `prompt_logprobs` and `stop_when` are set if requested.
    """

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Maybe[Usage] = UNSET
    system_fingerprint: Maybe[str] = UNSET
    service_tier: Maybe[str] = UNSET
    metadata: Maybe[dict[str, str]] = UNSET
    moderation: Maybe[JSONObject] = UNSET
    prompt_token_ids: Maybe[list[int]] = UNSET
    prompt_logprobs: Maybe[PromptLogprobs] = UNSET
    stop_when: Maybe[StopWhenResult] = UNSET


class FunctionCallDelta(Wire, frozen=True, kw_only=True):
    """New parts of a function call."""

    name: Maybe[str] = UNSET
    arguments: Maybe[str] = UNSET


class ToolCallDelta(Wire, frozen=True, kw_only=True):
    """New parts of the tool call number `index`."""

    index: int
    id: Maybe[str] = UNSET
    type: Maybe[str] = UNSET
    function: Maybe[FunctionCallDelta] = UNSET


class Delta(Wire, frozen=True, kw_only=True):
    """New parts of a message: its role in the first chunk, then text."""

    role: Maybe[str] = UNSET
    content: Maybe[str] = UNSET
    refusal: Maybe[str] = UNSET
    reasoning_content: Maybe[str] = UNSET
    tool_calls: Maybe[list[ToolCallDelta]] = UNSET
    function_call: Maybe[FunctionCallDelta] = UNSET


class ChunkChoice(Wire, frozen=True, kw_only=True):
    """New parts of one sample; `finish_reason` is set on its last chunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: Maybe[list[int]] = UNSET


class ChatCompletionChunk(Wire, frozen=True, kw_only=True):
    """One event of a streamed chat completion. `usage` is null on chunks before the one that carries it.

    If requested, `prompt_token_ids` comes with the first chunk of each choice, and `stop_when` with the last chunk.
    """

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Maybe[Usage] = UNSET
    system_fingerprint: Maybe[str] = UNSET
    service_tier: Maybe[str] = UNSET
    moderation: Maybe[JSONObject] = UNSET
    obfuscation: Maybe[str] = UNSET
    prompt_token_ids: Maybe[list[int]] = UNSET
    stop_when: Maybe[StopWhenResult] = UNSET
