"""The HTTP server: connections, middleware, access checks, and the context that handlers share."""

from __future__ import annotations

from tok_server.http.access import tenant_cache_salt
from tok_server.http.body import Members, check_compression_ratio, decode_members, read_body
from tok_server.http.connections import MIN_READ_BYTES, accept_connections, raise_file_limit
from tok_server.http.context import CONTEXT, Context
from tok_server.http.event_loop import run, shorten_pauses
from tok_server.http.middleware import request_middleware, set_response_headers
from tok_server.http.request_limits import UnreadLimit, deadline

__all__ = [
    "CONTEXT",
    "MIN_READ_BYTES",
    "Context",
    "Members",
    "UnreadLimit",
    "accept_connections",
    "check_compression_ratio",
    "deadline",
    "decode_members",
    "raise_file_limit",
    "read_body",
    "request_middleware",
    "run",
    "set_response_headers",
    "shorten_pauses",
    "tenant_cache_salt",
]
