"""Log how long each part of a worker's start takes, at level debug."""

from __future__ import annotations

import logging
import time

from tok_core.runtime import HEARTBEAT

log = logging.getLogger("tok_core")


class StartupTimer:
    """Read at the end of each part."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def done(self, part: str) -> None:
        """`part` is what was done since the last call, or since this was made."""
        HEARTBEAT.turned()
        now = time.monotonic()
        log.debug("start: %s: %.1f s", part, now - self._began)
        self._began = now
