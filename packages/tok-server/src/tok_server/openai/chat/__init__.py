"""Serve /v1/chat/completions."""

from __future__ import annotations

from tok_server.openai.chat.endpoint import make_chat_job
from tok_server.openai.chat.prompt import chat_prompt, chat_text

__all__ = ["chat_prompt", "chat_text", "make_chat_job"]
