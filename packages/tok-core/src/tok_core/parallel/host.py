"""A number for the host that a process is on, by which workers tell whether they share one. Knows no torch."""

from __future__ import annotations

import socket
import zlib
from pathlib import Path

BOOT = Path("/proc/sys/kernel/random/boot_id")


def this_host() -> int:
    """32 bits, the same for all processes that may reach each other's memory, and hardly ever for others.

    Its name alone does not tell, as hosts may be called alike, nor its kernel, which several containers may share.
    """
    started = BOOT.read_bytes() if BOOT.exists() else b""
    return zlib.crc32(started + socket.gethostname().encode())
