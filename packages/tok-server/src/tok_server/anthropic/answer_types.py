"""Wire types of the answers of /v1/messages: the message, its blocks, and the events of a stream."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from tok_client.types import UNSET, UnsetType

StopReason = Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]


class TokenCount(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `POST /v1/messages/count_tokens`."""

    input_tokens: int


class TextBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """Text of the answer."""

    text: str = ""


class ThinkingBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    """Reasoning before the answer. `signature` is empty: clients require the field."""

    thinking: str = ""
    signature: str = ""


class ToolUseBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    """A call of a tool. `input` is a JSON object, in the model's own spelling."""

    id: str
    name: str
    input: Annotated[msgspec.Raw, msgspec.Meta(extra_json_schema={"type": "object"})]


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class ThinkingTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The number of output tokens that are reasoning."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one request. The prompt has `input_tokens` + `cache_read_input_tokens` tokens.

    input_tokens             prompt tokens that were computed
    cache_read_input_tokens  prompt tokens found in the prefix cache
    output_tokens_details    present if the server recognises the model's reasoning
    """

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens_details: ThinkingTokens | UnsetType = UNSET


class MessageAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `POST /v1/messages`.

    stop_reason    null in the first event of a stream
    stop_sequence  the stop sequence that ended the answer, if any
    """

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TextDelta(msgspec.Struct, frozen=True, tag_field="type", tag="text_delta"):
    """New text of a text block."""

    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, tag_field="type", tag="thinking_delta"):
    """New text of a thinking block."""

    thinking: str


class SignatureDelta(msgspec.Struct, frozen=True, tag_field="type", tag="signature_delta"):
    """The signature of a thinking block, at its end."""

    signature: str


class InputJsonDelta(msgspec.Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    """New text of a call's input."""

    partial_json: str


class MessageStart(msgspec.Struct, frozen=True, tag_field="type", tag="message_start"):
    """Event: the message begins. Its usage counts the whole prompt as not cached; `message_delta` corrects it."""

    message: MessageAnswer


class ContentBlockStart(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_start"):
    """Event: block number `index` begins, empty."""

    index: int
    content_block: AnswerBlock


class ContentBlockDelta(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_delta"):
    """Event: a block gains text."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class ContentBlockStop(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_stop"):
    """Event: a block has ended."""

    index: int


class MessageEnding(msgspec.Struct, frozen=True):
    """The reason why the message ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, frozen=True, tag_field="type", tag="message_delta"):
    """Event: the message has ended."""

    delta: MessageEnding
    usage: MessageUsage


class MessageStop(msgspec.Struct, frozen=True, tag_field="type", tag="message_stop"):
    """Event: the stream ends."""


MessageEvent = MessageStart | ContentBlockStart | ContentBlockDelta | ContentBlockStop | MessageDelta | MessageStop
