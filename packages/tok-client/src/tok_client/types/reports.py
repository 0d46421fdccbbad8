"""What a server says of itself: health, readiness, version."""

from __future__ import annotations

from msgspec import field

from tok_client.types.base import Wire


class ReplicaReport(Wire, frozen=True, kw_only=True):
    """One replica of the engine: "ready" or what it is doing instead, and why."""

    state: str
    detail: str = ""


class HealthReport(Wire, frozen=True, kw_only=True):
    """Response of `GET /health`; 503 unless requests are taken."""

    status: str
    detail: str = ""
    replicas: list[ReplicaReport] = field(default_factory=list)


class ReadyReport(Wire, frozen=True, kw_only=True):
    """Response of `GET /ready`; 503 unless requests are taken."""

    ready: bool
    status: str


class VersionReport(Wire, frozen=True, kw_only=True):
    """Response of `GET /version`."""

    version: str
