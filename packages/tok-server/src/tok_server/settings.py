"""Settings: everything the server is told at its start that the engine need not know."""

from __future__ import annotations

import msgspec

from tok_core import InvalidField

MIB = 1 << 20


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the server is told at its start. Checked when constructed (`InvalidField`).

    model_name      the name under which the model is served
    host, port      where to listen; port 0: any free one
    api_key         what clients must send as bearer token; None: everyone is served
    max_body        most bytes of a request's body
    body_timeout    seconds in which a request's body must have arrived
    drain           seconds open requests are given to end when the server is asked to stop
    """

    model_name: str
    host: str = "127.0.0.1"
    port: int = 10210
    api_key: str | None = None
    max_body: int = 64 * MIB
    body_timeout: float = 60.0
    drain: float = 30.0

    def __post_init__(self) -> None:
        if not self.model_name:
            raise InvalidField("model_name", self.model_name, "a name of at least one character")
        if not self.host:
            raise InvalidField("host", self.host, "an address or a host name")
        if not 0 <= self.port <= 65_535:
            raise InvalidField("port", self.port, "integers from 0 (any free port) to 65535")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.strip()):
            raise InvalidField("api_key", "***", "ASCII text of at least one character")
        if self.max_body < 1:
            raise InvalidField("max_body", self.max_body, "bytes, at least 1")
        if not self.body_timeout > 0:
            raise InvalidField("body_timeout", self.body_timeout, "seconds above 0")
        if not self.drain >= 0:
            raise InvalidField("drain", self.drain, "seconds, at least 0")
