"""Convert `uv.lock` to its committed form: every version pinned, no address of any package index.

uv writes into `uv.lock` the address of each file, which is valid only in the network where uv ran. The committed form
keeps names, versions and markers. It also empties the members' `requires-dist`: uv then finds the lock outdated,
resolves again against the user's own index with the pinned versions as preferences, and fills in the addresses. (With
full lists uv takes the lock as it is and finds nothing to install.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import tomlkit

NOWHERE = "https://index.invalid/simple"
"""Replaces the address of an index; names below `.invalid` never resolve (RFC 2606)."""

_URL = re.compile(r"[a-z][a-z0-9+.-]*://[^\s\"'<>]+", re.IGNORECASE)


class Pin(NamedTuple):
    """One locked version; `markers` is empty if the version applies to every environment."""

    name: str
    version: str
    markers: tuple[str, ...] = ()


def addressless(lock: str) -> str:
    """Return the committed form of a lock. The function is idempotent."""
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
    """Return every URL in `text` whose host may resolve, in order."""
    return [url for url in _URL.findall(text) if not (urlsplit(url).hostname or "").endswith(".invalid")]


def pins(lock: str) -> set[Pin]:
    """Return the pins of a lock without the workspace's own packages."""
    packages: Any = tomlkit.parse(lock).unwrap()["package"]
    return {
        Pin(package["name"], package["version"], tuple(package.get("resolution-markers", ())))
        for package in packages
        if "registry" in package["source"]
    }


def constraints(lock: str) -> str:
    """Return the pins as a sorted constraints file, one requirement a line."""
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
