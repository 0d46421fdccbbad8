"""What the server is told at its start: settings, limits, the model's markup."""

from __future__ import annotations

from tok_server.settings.formats import Formats, ReasoningParser, ToolCallParser
from tok_server.settings.limits import MAX_CLIENT_PRIORITY, Limits
from tok_server.settings.settings import Settings

__all__ = ["MAX_CLIENT_PRIORITY", "Formats", "Limits", "ReasoningParser", "Settings", "ToolCallParser"]
