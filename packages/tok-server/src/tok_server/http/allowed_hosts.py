"""AllowedHosts: the host names that the server answers to.

A web page can make its own name resolve to 127.0.0.1 (DNS rebinding). The browser then takes this server's answers for
the page's own origin. Requests for other names than the server's own are therefore refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address

from aiohttp import web

from tok_server.wire import ApiError

ANY_HOST = "*"
MAX_CACHED_HOSTS = 256  # `Host` values that are remembered


class AllowedHosts:
    """Host names under which clients may address a server that listens on `host`.

    allowed  names besides localhost and IP addresses; "*": any. If empty, a server on a loopback address accepts no
             other name, a server on any other address every name
    """

    def __init__(self, host: str, allowed: Sequence[str] = ()) -> None:
        self._names = frozenset(_hostname(one) for one in (*allowed, "localhost", host))
        self._restricted = ANY_HOST not in allowed and (bool(allowed) or _is_loopback(_hostname(host)))
        self._check_every_address = bool(allowed)  # else only connections to a loopback address are checked
        self._accepted: set[str] = set()  # `Host` values that are allowed

    def check(self, request: web.BaseRequest) -> None:
        """Raise ApiError (403) for a request whose `Host` is not a name of the server."""
        host = request.headers.get("Host", "")
        if not self._restricted or host in self._accepted:
            return
        name = _hostname(host)
        if name and name not in self._names and not name.endswith(".localhost") and not _is_address(name):
            if self._check_every_address or _arrives_at_loopback(request):
                message = f"Host is {host[:200]!r}; allowed: this server's names and those added with --allowed-host"
                raise ApiError(403, message, param="Host", code="host_not_allowed")
        elif len(self._accepted) < MAX_CACHED_HOSTS:
            self._accepted.add(host)


def _hostname(host: str) -> str:
    """Return the host without its port: "[::1]:80" is "::1"."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name = host if host.count(":") > 1 else host.partition(":")[0]
    return name.rstrip(".").lower()


def _is_address(name: str) -> bool:
    # Rebinding needs a name: a page loaded from an address comes from the host with that address.
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(name: str) -> bool:
    return name == "localhost" or (_is_address(name) and ip_address(name).is_loopback)


def _arrives_at_loopback(request: web.BaseRequest) -> bool:
    own = None if request.transport is None else request.transport.get_extra_info("sockname")
    return not isinstance(own, tuple) or _is_loopback(str(own[0]))
