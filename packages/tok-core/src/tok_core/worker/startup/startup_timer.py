"""Log the duration of each part of a worker's startup, at level debug."""

from __future__ import annotations

import logging
import time

from tok_core.runtime import HEARTBEAT

log = logging.getLogger("tok_core")


class StartupTimer:
    """Timer of consecutive parts of the startup."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def done(self, part: str) -> None:
        """Log the time since the last call, or since construction, as that of `part`."""
        HEARTBEAT.turned()
        now = time.monotonic()
        log.debug("start: %s: %.1f s", part, now - self._began)
        self._began = now
