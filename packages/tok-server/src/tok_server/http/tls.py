"""TLS contexts for HTTPS, from two PEM files."""

from __future__ import annotations

import ssl

from tok_core import InvalidField


def server_context(cert: str, key: str | None) -> ssl.SSLContext:
    """Return a context of TLS 1.2 or later with this certificate. Errors: InvalidField naming the unusable file."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    for field, name in (("tls_cert", cert), ("tls_key", key)):
        if name is not None:
            _check_readable(field, name)
    try:
        # An empty password keeps OpenSSL from prompting on the terminal.
        context.load_cert_chain(cert, key, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error)
        raise InvalidField(
            "tls_cert", cert, f"a certificate and its key without password, as PEM ({reason})"
        ) from error
    return context


def _check_readable(field: str, name: str) -> None:
    try:
        with open(name, "rb"):
            pass
    except OSError as error:
        raise InvalidField(field, name, f"a readable file ({error.strerror})") from error
