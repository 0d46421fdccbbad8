"""The HTTP server: connections, middleware, access checks, and the context that handlers share."""

from __future__ import annotations

from tok_server.http.auth import salted
from tok_server.http.body import Members, check_ratio, members, read_body
from tok_server.http.connections import MIN_READ_BYTES, allow_files, listening
from tok_server.http.context import CONTEXT, Context
from tok_server.http.event_loop import run
from tok_server.http.middleware import common, set_response_headers
from tok_server.http.pauses import shorten_pauses
from tok_server.http.tls import server_context

__all__ = [
    "CONTEXT",
    "MIN_READ_BYTES",
    "Context",
    "Members",
    "allow_files",
    "check_ratio",
    "common",
    "listening",
    "members",
    "read_body",
    "run",
    "salted",
    "server_context",
    "set_response_headers",
    "shorten_pauses",
]
