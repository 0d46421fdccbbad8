"""Settings: all start options of the server that the engine does not need."""

from __future__ import annotations

from tok_core import InvalidField
from tok_server.settings.formats import Formats
from tok_server.settings.limits import Limits


class Settings(Limits, frozen=True, kw_only=True):
    """All start options of the server, including its limits. Validated when constructed (`InvalidField`).

    model_name       the name under which the model is served
    host, port       address to listen on; port 0: any free one
    api_keys         keys of which clients must send one as bearer token; none: every client is served
    share_prefixes   whether prompts of different API keys share cached prefixes
    admin_key        the key for /admin/; None: /admin/ is not served
    allow_origins    origins whose web pages may use the server from a browser; "*": all
    allowed_hosts    `Host` names accepted besides localhost and IP addresses; "*": any. If empty, a server on a
                     loopback address accepts no other name, a server on any other address every name
    tls_cert         PEM file with the server's certificate and its chain; None: plain HTTP
    tls_key          PEM file with the certificate's key; None: it is in `tls_cert`
    data_dir         directory of files and batches; None: the server has neither
    otlp_endpoint    URL of an OpenTelemetry collector that spans are sent to; None: no spans
    formats          how the model writes tool calls and reasoning
    """

    model_name: str
    host: str = "127.0.0.1"
    port: int = 10210
    api_keys: tuple[str, ...] = ()
    share_prefixes: bool = False
    admin_key: str | None = None
    allow_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    tls_cert: str | None = None
    tls_key: str | None = None
    data_dir: str | None = None
    otlp_endpoint: str | None = None
    formats: Formats = Formats()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model_name:
            raise InvalidField("model_name", self.model_name, "a name of at least one character")
        if not self.host:
            raise InvalidField("host", self.host, "an address or a host name")
        if not 0 <= self.port <= 65_535:
            raise InvalidField("port", self.port, "integers from 0 (any free port) to 65535")
        for key in self.api_keys:
            _check_key("api_key", key)
        if self.admin_key is not None:
            _check_key("admin_key", self.admin_key)
            if self.admin_key in self.api_keys:
                raise InvalidField("admin_key", "***", "a key that is not an API key")
        if self.tls_key is not None and self.tls_cert is None:
            raise InvalidField("tls_key", self.tls_key, "only together with --tls-cert")


def _check_key(field: str, key: str) -> None:
    # A key with spaces around it could never be sent: HTTP strips them from headers.
    if not (key.isascii() and key.isprintable() and key and key == key.strip()):
        raise InvalidField(field, "***", "printable ASCII of at least one character, without spaces around it")
