"""Meeting: where the workers of a replica find each other when no file is common to them. Knows no torch."""

from __future__ import annotations

import msgspec


class Meeting(msgspec.Struct, frozen=True):
    """Worker 0 listens at `host` and `port`; `listener` is the file descriptor it does so with, known to it alone."""

    host: str
    port: int
    listener: int | None = None
