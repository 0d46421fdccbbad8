"""The chat completion, and the chunks of a streamed one."""

from __future__ import annotations

from msgspec import field

from tok_client.types.base import UNSET, JSONObject, Maybe, Wire
from tok_client.types.chat.messages import CustomToolCall, FunctionCall, FunctionToolCall
from tok_client.types.common import PromptLogprobs, Usage
from tok_client.types.stop_when import StopWhenResult


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

    `prompt_logprobs` and `stop_when` are set if requested.
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

    `stop_when`, if requested, comes with the last chunk.
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
    stop_when: Maybe[StopWhenResult] = UNSET
