"""Rendezvous of the workers of a replica on hosts without a common file system. Imports no torch."""

from __future__ import annotations

import msgspec


class Rendezvous(msgspec.Struct, frozen=True):
    """Worker 0 listens at `host` and `port`; `listener` is the file descriptor it does so with, known to it alone."""

    host: str
    port: int
    listener: int | None = None
