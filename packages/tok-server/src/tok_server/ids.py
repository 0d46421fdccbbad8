"""Names that tell answers apart: request ids and the server's fingerprint."""

from __future__ import annotations

import secrets
from functools import cache
from importlib.metadata import version


def new_id(prefix: str) -> str:
    """A fresh id such as "cmpl-5f0c…"."""
    return f"{prefix}-{secrets.token_hex(12)}"


@cache
def fingerprint() -> str:
    """Changes when answers to the same seed may change: the version of the engine."""
    return f"tok-{version('tok-core')}"
