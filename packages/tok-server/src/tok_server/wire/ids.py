"""Names that tell answers apart: request ids and the server's fingerprint."""

from __future__ import annotations

import os
import random
from functools import cache
from importlib.metadata import version

_SOURCE = random.Random()  # seeded by the system once: asking it each time may wait
os.register_at_fork(after_in_child=_SOURCE.seed)  # else both processes would give the same ids


def new_id(prefix: str) -> str:
    """A fresh id such as "cmpl-5f0c…"."""
    return f"{prefix}-{_SOURCE.getrandbits(96):024x}"


@cache
def fingerprint() -> str:
    """Changes when answers to the same seed may change: the version of the engine."""
    return f"tok-{version('tok-core')}"
