"""Identify the host of a process by a number, so that workers can detect a common host. Imports no torch."""

from __future__ import annotations

import socket
import zlib
from pathlib import Path

BOOT = Path("/proc/sys/kernel/random/boot_id")


def this_host() -> int:
    """Return a 32-bit hash: equal for processes that may reach each other's memory, and almost never for others.

    It combines boot id and host name. Several hosts may have one name, and several containers share one kernel.
    """
    started = BOOT.read_bytes() if BOOT.exists() else b""
    return zlib.crc32(started + socket.gethostname().encode())
