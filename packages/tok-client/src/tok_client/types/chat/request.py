"""The chat completion request with every field of OpenAI's reference, so that a server can refuse one by name."""

from __future__ import annotations

from typing import Literal

from tok_client.types.base import UNSET, JSONObject, Maybe
from tok_client.types.chat.messages import Message
from tok_client.types.chat.tools import Tool, ToolChoice
from tok_client.types.common import GenerationRequest


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

    def __post_init__(self) -> None:
        if not self.messages:
            raise ValueError("messages is []; allowed: at least one message")
