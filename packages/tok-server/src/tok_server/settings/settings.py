"""Settings: everything the server is told at its start that the engine need not know."""

from __future__ import annotations

from tok_core import InvalidField
from tok_server.settings.formats import Formats
from tok_server.settings.limits import Limits


class Settings(Limits, frozen=True, kw_only=True):
    """Everything the server is told at its start, its limits included. Checked when constructed (`InvalidField`).

    model_name       the name under which the model is served
    host, port       where to listen; port 0: any free one
    api_keys         keys one of which clients must send as bearer token; none: everyone is served
    share_prefixes   whether prompts of different API keys share cached prefixes
    admin_key        the key for /admin/; None: nobody is served there
    allow_origins    origins whose web pages may use the server from a browser; "*": all
    allowed_hosts    names by which the server is asked beside localhost and addresses (`Host`); "*": any. Without any,
                     a server on a loopback address answers to no other name, one on another address to every name
    tls_cert         PEM file with the server's certificate and those that lead to its authority; None: plain HTTP
    tls_key          PEM file with its key; None: it is in `tls_cert`
    data_dir         where files and batches are kept; None: there are none
    otlp_endpoint    URL of an OpenTelemetry collector that spans are sent to; None: there are none
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
                raise InvalidField("admin_key", "***", "a key that is no API key, too")
        if self.tls_key is not None and self.tls_cert is None:
            raise InvalidField("tls_key", self.tls_key, "nothing without --tls-cert")


def _check_key(field: str, key: str) -> None:
    # A key with spaces around it could never be sent: headers lose them.
    if not (key.isascii() and key.isprintable() and key and key == key.strip()):
        raise InvalidField(field, "***", "printable ASCII of at least one character, without spaces around it")
