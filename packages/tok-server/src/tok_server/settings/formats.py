"""Formats: settings for the markup of tool calls and reasoning in the model's output."""

from __future__ import annotations

from typing import Literal

import msgspec

ToolCallParser = Literal["auto", "hermes", "llama3", "none"]
ReasoningParser = Literal["auto", "qwen3", "none"]


class Formats(msgspec.Struct, frozen=True):
    """Markup that the model writes. "auto": detected from the chat template (`tok_server.parsing.formats`)."""

    tool_calls: ToolCallParser = "auto"
    reasoning: ReasoningParser = "auto"
