"""/v1/responses: a conversation in items, answered in items. What is asked becomes a chat, and is computed as one."""

from __future__ import annotations

from tok_server.openai.responses.form import ResponseForm

__all__ = [
    "ResponseForm",
]
