"""Telemetry: send a span per request to an OpenTelemetry collector. OpenTelemetry is imported only if it is enabled."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from aiohttp import web

from tok_core import InvalidField
from tok_server.observability.request_stats import RequestCounts

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

TRACES_PATH = "/v1/traces"


class Telemetry:
    """Exporter that sends spans of requests to a collector, in a thread of its own.

    endpoint  URL of the collector; `TRACES_PATH` is appended to a URL without a path
    model     name of the model in the spans
    Errors: InvalidField("otlp_endpoint") for an invalid URL, or if OpenTelemetry is not installed.
    """

    def __init__(self, endpoint: str, model: str) -> None:
        url = _traces_url(endpoint)
        try:
            from opentelemetry.trace import SpanKind, StatusCode
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            allowed = "none, because OpenTelemetry is not installed (pip install 'tok-server[otel]')"
            raise InvalidField("otlp_endpoint", endpoint, allowed) from error
        self._provider = _provider(url)
        self._tracer = self._provider.get_tracer("tok_server", version("tok-server"))
        self._extract_context = TraceContextTextMapPropagator().extract
        self._kind, self._error = SpanKind.SERVER, StatusCode.ERROR
        self._model = model

    def record(self, request: web.Request, endpoint: str, counts: RequestCounts, status: int) -> None:
        """Send the span of a request that ends now, as part of the trace that its `traceparent` names."""
        now = time.time_ns()
        later = time.monotonic()

        def at(moment: float) -> int:
            return now - int((later - moment) * 1e9)

        span = self._tracer.start_span(
            f"{request.method} {endpoint}",
            context=self._extract_context(request.headers),
            kind=self._kind,
            start_time=at(counts.started),
            attributes={
                "http.request.method": request.method,
                "http.route": endpoint,
                "url.path": request.rel_url.raw_path[:500],
                "http.response.status_code": status,
                "tok.request_id": counts.id,
            },
        )
        if counts.queued is not None:
            span.set_attributes(self._usage_attributes(counts))
            span.add_event("queued", timestamp=at(counts.queued))
        if counts.first_token is not None:
            span.add_event("first_token", timestamp=at(counts.first_token))
        span.add_event("finish", timestamp=now)
        if status >= 500:
            span.set_status(self._error)
        span.end(now)

    def close(self) -> None:
        """Send the remaining spans. Blocks for some seconds if the collector does not answer."""
        self._provider.shutdown()

    def _usage_attributes(self, counts: RequestCounts) -> dict[str, str | int]:
        return {
            "gen_ai.request.model": self._model,
            "gen_ai.usage.input_tokens": counts.prompt_tokens,
            "gen_ai.usage.output_tokens": counts.output_tokens,
            "tok.usage.cached_tokens": counts.cached_tokens,
        }


def _provider(url: str) -> TracerProvider:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({"service.name": "tok", "service.version": version("tok-server")})
    # The server shuts the provider down itself, after the last response.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url, timeout=5)))
    return provider


def _traces_url(endpoint: str) -> str:
    """Return the URL to send spans to. Errors: InvalidField."""
    try:
        parts = urlsplit(endpoint)
        whole = parts.scheme in ("http", "https") and parts.hostname is not None
    except ValueError:
        whole = False
    if not whole:
        raise InvalidField("otlp_endpoint", endpoint, "a URL such as http://127.0.0.1:4318")
    return endpoint if parts.path.strip("/") else endpoint.rstrip("/") + TRACES_PATH
