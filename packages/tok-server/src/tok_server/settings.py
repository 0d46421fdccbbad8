"""Settings of the server at its start: options, limits, and the markup of the model's output."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from tok_core import InvalidField
from tok_core.sampling_params import MAX_N

ToolCallParser = Literal["auto", "hermes", "llama3", "none"]
ReasoningParser = Literal["auto", "qwen3", "none"]

MIB = 1 << 20
GIB = 1 << 30


class Formats(msgspec.Struct, frozen=True):
    """Formats of chats: what their prompts may be rendered with, and the markup that the model writes.

    tool_calls, reasoning        "auto": detected from the chat template (`tok_server.openai.chat.prompt`)
    trust_request_chat_template  requests may carry their own chat template
    """

    tool_calls: ToolCallParser = "auto"
    reasoning: ReasoningParser = "auto"
    trust_request_chat_template: bool = False


AUTO = Formats()


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on sizes, counts and times. Validated when constructed (`InvalidField`).

    max_connections      open connections; further ones are refused with 503
    max_header           bytes of the request line, and of each header line
    max_body             bytes of a JSON body; `tok_server.http.body` bounds its structure
    max_bodies           bytes of all bodies held at once; further requests are refused with 503
    max_file             bytes of an uploaded file
    data_quota           bytes of all files and batch answers in the data directory; None: unlimited
    max_unread           bytes buffered of a stream whose client does not read; beyond, the stream is ended
    max_n                samples of one prompt, at most the engine's own limit
    min_client_priority  smallest `priority` that clients may ask for; requests of smaller priority preempt others
    max_queued           client prompts waiting for the engine at once, batch lines excluded. At the limit, further
                         requests are refused with 429, except for keys with fewer open prompts than an equal share
    rate_limit_requests  requests per minute and key, batch lines excluded; None: unlimited
    rate_limit_tokens    prompt and output tokens per minute and key, batches excluded; None: unlimited
    header_timeout       seconds in which a request's line and headers must arrive, once begun
    body_timeout         seconds in which a request's body must arrive
    write_timeout        seconds in which a client must take `tok_server.http.MIN_READ_BYTES` bytes of its response
    idle_timeout         seconds after which a connection without a request is closed
    request_timeout      seconds in which a request must be answered
    drain_timeout        seconds that open requests get to finish when the server is asked to stop
    """

    max_connections: int = 16_384
    max_header: int = 16_384
    max_body: int = 8 * MIB
    max_bodies: int = 2 * GIB
    max_file: int = 8 * GIB
    data_quota: int | None = None
    max_unread: int = MIB
    max_n: int = MAX_N
    min_client_priority: int = 0
    max_queued: int = 65_536
    rate_limit_requests: int | None = None
    rate_limit_tokens: int | None = None
    header_timeout: float = 20.0
    body_timeout: float = 60.0
    write_timeout: float = 60.0
    idle_timeout: float = 300.0
    request_timeout: float = 3600.0
    drain_timeout: float = 30.0

    def __post_init__(self) -> None:
        for name, unit in COUNTS.items():
            value = getattr(self, name)
            if value is not None and value < MIN_VALUES.get(name, 1):
                raise InvalidField(name, value, f"integers from {MIN_VALUES.get(name, 1)} ({unit})")
        if self.max_n > MAX_N:
            raise InvalidField("max_n", self.max_n, f"integers from 1 to {MAX_N} (the engine's limit)")
        if self.min_client_priority > MAX_CLIENT_PRIORITY:
            allowed = f"integers from {-MAX_CLIENT_PRIORITY} to {MAX_CLIENT_PRIORITY}"
            raise InvalidField("min_client_priority", self.min_client_priority, allowed)
        for name in SECONDS:
            if not getattr(self, name) > 0:
                raise InvalidField(name, getattr(self, name), "seconds above 0")
        if not self.drain_timeout >= 0:
            raise InvalidField("drain_timeout", self.drain_timeout, "seconds from 0")


COUNTS = {
    "max_connections": "connections",
    "max_header": "bytes",
    "max_body": "bytes",
    "max_bodies": "bytes",
    "max_file": "bytes",
    "data_quota": "bytes",
    "max_unread": "bytes",
    "max_n": "samples",
    "max_queued": "requests",
    "min_client_priority": "priorities",
    "rate_limit_requests": "requests per minute",
    "rate_limit_tokens": "tokens per minute",
}
MAX_CLIENT_PRIORITY = (1 << 31) - 1  # far below the priorities of batch lines, which come after every client
MIN_VALUES = {
    "max_header": 1024,  # bytes; less would refuse ordinary requests
    "max_queued": 0,
    "max_unread": 4096,  # bytes; less would end ordinary streams
    "min_client_priority": -MAX_CLIENT_PRIORITY,
}
ORIGIN = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://[^/?#\s]+/?")
SECONDS = ("header_timeout", "body_timeout", "write_timeout", "idle_timeout", "request_timeout")


class Settings(Limits, frozen=True, kw_only=True):
    """All start options of the server, including its limits. Validated when constructed (`InvalidField`).

    model_name       the name under which the model is served, which responses show
    model_aliases    further names that requests may use
    host, port       address to listen on; port 0: any free one
    api_keys         keys, one of which clients must send as bearer token; none: every client is served
    share_prefixes   whether prompts of different API keys share cached prefixes
    admin_key        the key for /admin/; None: /admin/ is not served
    enable_rl        whether the endpoints of `tok_server.rl` are served
    allow_origins    origins whose web pages may use the server from a browser; "*": all
    allowed_hosts    `Host` names accepted besides localhost and IP addresses; "*": any. If empty, a server on a
                     loopback address accepts no other name, a server on any other address every name
    tls_cert         PEM file with the server's certificate and its chain; None: plain HTTP
    tls_key          PEM file with the certificate's key; None: it is in `tls_cert`
    data_dir         directory of files and batches; None: the server has neither
    require_data_dir whether the start fails if `data_dir` cannot be used; else the server then has no files and batches
    otlp_endpoint    URL of an OpenTelemetry collector that spans are sent to; None: no spans
    formats          how chats are rendered, and how the model writes tool calls and reasoning
    """

    model_name: str
    model_aliases: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 10210
    api_keys: tuple[str, ...] = ()
    share_prefixes: bool = False
    admin_key: str | None = None
    enable_rl: bool = False
    allow_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    tls_cert: str | None = None
    tls_key: str | None = None
    data_dir: str | None = None
    require_data_dir: bool = True
    otlp_endpoint: str | None = None
    formats: Formats = Formats()

    def __post_init__(self) -> None:
        super().__post_init__()
        if "" in self.model_names:
            raise InvalidField("served_model_name", "", "names of at least one character")
        if not self.host:
            raise InvalidField("host", self.host, "an address or a host name")
        if not 0 <= self.port <= 65_535:
            raise InvalidField("port", self.port, "integers from 0 (any free port) to 65535")
        for origin in self.allow_origins:
            if origin not in ("*", "null") and not ORIGIN.fullmatch(origin):
                raise InvalidField("allow_origin", origin, "*, or an origin such as https://example.org")
        for host in self.allowed_hosts:
            if not host or "/" in host:
                raise InvalidField("allowed_host", host, "*, or a host name such as example.org")
        for key in self.api_keys:
            _check_key("api_key", key)
        if self.admin_key is not None:
            _check_key("admin_key", self.admin_key)
            if self.admin_key in self.api_keys:
                raise InvalidField("admin_key", "***", "a key that is not an API key")
        if self.tls_key is not None and self.tls_cert is None:
            raise InvalidField("tls_key", self.tls_key, "only together with --tls-cert")

    @property
    def model_names(self) -> tuple[str, ...]:
        """Return all names of the model, each once; responses show the first."""
        return tuple(dict.fromkeys((self.model_name, *self.model_aliases)))


def _check_key(field: str, key: str) -> None:
    # A key with spaces around it could never be sent: HTTP strips them from headers.
    if not (key.isascii() and key.isprintable() and key and key == key.strip()):
        raise InvalidField(field, "***", "printable ASCII of at least one character, without spaces around it")
