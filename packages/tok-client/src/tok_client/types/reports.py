"""A server's reports on itself: health, readiness, version."""

from __future__ import annotations

from msgspec import field

from tok_client.types.base import Wire


class ReplicaReport(Wire, frozen=True, kw_only=True):
    """One replica of the engine: "ready" or another state, and the reason."""

    state: str
    detail: str = ""


class HealthReport(Wire, frozen=True, kw_only=True):
    """Response of `GET /health`, with status 503 unless the server takes requests."""

    status: str
    detail: str = ""
    replicas: list[ReplicaReport] = field(default_factory=list)


class ReadyReport(Wire, frozen=True, kw_only=True):
    """Response of `GET /ready`, with status 503 unless the server takes requests."""

    ready: bool
    status: str


class VersionReport(Wire, frozen=True, kw_only=True):
    """Response of `GET /version`."""

    version: str
