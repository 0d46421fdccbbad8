"""Settings of the server at its start: options, limits, and the markup of the model's output."""

from __future__ import annotations

from tok_server.settings.formats import Formats, ReasoningParser, ToolCallParser
from tok_server.settings.limits import MAX_CLIENT_PRIORITY, Limits
from tok_server.settings.settings import Settings

__all__ = ["MAX_CLIENT_PRIORITY", "Formats", "Limits", "ReasoningParser", "Settings", "ToolCallParser"]
