"""Serve /v1/chat/completions."""

from __future__ import annotations

from tok_server.openai.chat.prompt import chat_text
from tok_server.openai.chat.serializer import ChatSerializer

__all__ = [
    "ChatSerializer",
    "chat_text",
]
