"""Formats: what the server is told of its model's markup."""

from __future__ import annotations

from typing import Literal

import msgspec

ToolCallParser = Literal["auto", "hermes", "llama3", "none"]
ReasoningParser = Literal["auto", "qwen3", "none"]


class Formats(msgspec.Struct, frozen=True):
    """Which markup the model writes; auto: what the chat template shows (`tok_server.parsing.formats`)."""

    tool_calls: ToolCallParser = "auto"
    reasoning: ReasoningParser = "auto"
