"""The lock as it is committed: every version pinned, no address of any package index.

uv writes into `uv.lock` where each file was found, which is true only of the network it ran in. The committed
form keeps names, versions and markers. The members' `requires-dist` are emptied as well: uv then sees that
the lock is out of step, resolves again against the user's own index with the pinned versions as preferences,
and fills the addresses in. (With the lists left full, uv takes the lock as it is and finds nothing to install.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import tomlkit

NOWHERE = "https://index.invalid/simple"
"""Stands where an index's address was; nothing below `.invalid` ever resolves (RFC 2606)."""

_URL = re.compile(r"[a-z][a-z0-9+.-]*://[^\s\"'<>]+", re.IGNORECASE)


class Pin(NamedTuple):
    """One locked version; `markers` is empty where the version holds for every environment."""

    name: str
    version: str
    markers: tuple[str, ...] = ()


def addressless(lock: str) -> str:
    """The text of a lock as it is committed. Doing it twice changes nothing."""
    document: Any = tomlkit.parse(lock)
    for package in document["package"]:
        package.pop("sdist", None)
        package.pop("wheels", None)
        if "requires-dist" in package.get("metadata", {}):
            package["metadata"]["requires-dist"] = []
    for table in _tables(document):
        if "registry" in table:
            table["registry"] = NOWHERE
    return tomlkit.dumps(document)


def addresses(text: str) -> list[str]:
    """Every URL in `text` that leads somewhere, in order."""
    return [url for url in _URL.findall(text) if not (urlsplit(url).hostname or "").endswith(".invalid")]


def pins(lock: str) -> set[Pin]:
    """What a lock pins; the workspace's own packages are left out."""
    packages: Any = tomlkit.parse(lock).unwrap()["package"]
    return {
        Pin(package["name"], package["version"], tuple(package.get("resolution-markers", ())))
        for package in packages
        if "registry" in package["source"]
    }


def constraints(lock: str) -> str:
    """The pins in the form of a constraints file, one requirement a line, sorted."""
    return "".join(f"{line}\n" for pin in sorted(pins(lock)) for line in _requirements(pin))


def _requirements(pin: Pin) -> list[str]:
    requirement = f"{pin.name}=={pin.version}"
    return [f"{requirement} ; {marker}" for marker in pin.markers] or [requirement]


def _tables(node: Any) -> Iterator[Any]:
    if isinstance(node, dict):
        yield node
        for value in node.values():
            yield from _tables(value)
    elif isinstance(node, list):
        for value in node:
            yield from _tables(value)
