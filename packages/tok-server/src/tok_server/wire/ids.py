"""Identifiers in responses: request ids and the server's fingerprint."""

from __future__ import annotations

import os
import random
from functools import cache
from importlib.metadata import version

_RANDOM = random.Random()  # seeded by the system once: a system call per id may block
os.register_at_fork(after_in_child=_RANDOM.seed)  # else both processes would produce the same ids


def new_id(prefix: str) -> str:
    """Return a fresh id such as "cmpl-5f0c…"."""
    return f"{prefix}-{_RANDOM.getrandbits(96):024x}"


@cache
def fingerprint() -> str:
    """Return the engine's version as a fingerprint: it changes when answers to the same seed may change."""
    return f"tok-{version('tok-core')}"
