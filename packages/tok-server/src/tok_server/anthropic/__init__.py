"""Serve Anthropic's API: messages, and the number of their tokens. A request is computed as a chat."""

from __future__ import annotations

from tok_server.anthropic.endpoint import OPERATIONS as ANTHROPIC_OPERATIONS

__all__ = ["ANTHROPIC_OPERATIONS"]
