"""Serve /v1/chat/completions."""

from __future__ import annotations

from tok_server.openai.chat.prompt import chat_text

__all__ = ["chat_text"]
