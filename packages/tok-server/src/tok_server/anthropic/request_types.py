"""Wire types of requests to /v1/messages. Types are checked here, ranges and supported kinds of blocks later."""

from __future__ import annotations

from typing import Literal

import msgspec

from tok_client.types import UNSET, JSONObject, Maybe

Effort = Literal["low", "medium", "high", "xhigh", "max"]


class TextInput(msgspec.Struct, frozen=True, kw_only=True):
    """A block of a system prompt or of a tool's result; only type "text" is supported.

    `cache_control` has no effect, here and below: every prefix is cached.
    """

    type: str
    text: Maybe[str] = UNSET
    cache_control: Maybe[JSONObject] = UNSET
    citations: Maybe[list[JSONObject]] = UNSET


class InputBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A block of a message. `type` gives its kind; the fields of other kinds are absent.

    text         text
    thinking     thinking: reasoning of the assistant; `signature` is not checked
    tool_use     id, name, input: a call that the assistant made
    tool_result  tool_use_id, content: the result of the call; is_error: the call failed
    """

    type: str
    text: Maybe[str] = UNSET
    citations: Maybe[list[JSONObject]] = UNSET
    thinking: Maybe[str] = UNSET
    signature: Maybe[str] = UNSET
    id: Maybe[str] = UNSET
    name: Maybe[str] = UNSET
    input: Maybe[JSONObject] = UNSET
    tool_use_id: Maybe[str] = UNSET
    content: Maybe[str | list[TextInput]] = UNSET
    is_error: Maybe[bool] = UNSET
    cache_control: Maybe[JSONObject] = UNSET


class InputMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message of the conversation. An answer's `role` and `content` are a valid message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[InputBlock]


class CustomToolInput(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that the client runs. Tools with other types than "custom" are not supported.

    `strict` requests input that always follows the schema.
    """

    type: Maybe[str] = UNSET
    name: Maybe[str] = UNSET
    description: Maybe[str] = UNSET
    input_schema: Maybe[JSONObject] = UNSET
    strict: Maybe[bool] = UNSET
    cache_control: Maybe[JSONObject] = UNSET


class ToolUseChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Whether tools are called: if the model decides so, always, only the tool `name`, or not at all."""

    type: Literal["auto", "any", "tool", "none"]
    name: Maybe[str] = UNSET
    disable_parallel_tool_use: Maybe[bool] = UNSET


class ThinkingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the model reasons before it answers."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Maybe[int] = UNSET
    display: Maybe[Literal["summarized", "omitted"]] = UNSET


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON schema of the answer's text."""

    type: Literal["json_schema"]
    schema: JSONObject


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The form of the answer, and how much effort the model takes."""

    format: Maybe[OutputFormat] = UNSET
    effort: Maybe[Effort] = UNSET


class CountTokensRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /v1/messages/count_tokens`: what the prompt consists of.

    thread  asks the server to store the conversation, which it refuses: the client then sends all of it each time

    Beyond Anthropic's reference: `chat_template_kwargs`, variables for the model's chat template.
    """

    messages: list[InputMessage]
    model: Maybe[str] = UNSET
    system: Maybe[str | list[TextInput]] = UNSET
    tools: Maybe[list[CustomToolInput]] = UNSET
    tool_choice: Maybe[ToolUseChoice] = UNSET
    thinking: Maybe[ThinkingConfig] = UNSET
    output_config: Maybe[OutputConfig] = UNSET
    output_format: Maybe[OutputFormat] = UNSET
    cache_control: Maybe[JSONObject] = UNSET
    thread: Maybe[JSONObject] = UNSET
    chat_template_kwargs: Maybe[JSONObject] = UNSET


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    """Body of `POST /v1/messages`.

    max_tokens  limit of the answer's tokens; it is lowered to what the model's length leaves after the prompt

    Beyond Anthropic's reference: `cache_salt` and the fields from min_p on, which mean the same as in chats.
    """

    max_tokens: int
    stream: Maybe[bool] = UNSET
    temperature: Maybe[float] = UNSET
    top_p: Maybe[float] = UNSET
    top_k: Maybe[int] = UNSET
    stop_sequences: Maybe[list[str]] = UNSET
    metadata: Maybe[JSONObject] = UNSET
    cache_salt: Maybe[str] = UNSET
    min_p: Maybe[float] = UNSET
    presence_penalty: Maybe[float] = UNSET
    frequency_penalty: Maybe[float] = UNSET
    repetition_penalty: Maybe[float] = UNSET
    logit_bias: Maybe[dict[str, float]] = UNSET
    seed: Maybe[int] = UNSET
    min_tokens: Maybe[int] = UNSET
    ignore_eos: Maybe[bool] = UNSET
    stop_token_ids: Maybe[list[int]] = UNSET
    priority: Maybe[int] = UNSET
