"""Serve /v1/responses: conversations and answers in items. A request is translated to a chat and computed as one."""

from __future__ import annotations
