"""Wait for conditions with a generous deadline, so that no test depends on the speed of the machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

# Seconds until a hanging test fails. Even a machine ten times slower than usual does not reach it.
PATIENCE = 300.0

POLL_SECONDS = 0.005


def wait_until(holds: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Return as soon as `holds()` is true; fail when it is not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"the condition did not hold within {seconds:g} s"
        time.sleep(POLL_SECONDS)


async def until(holds: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Return as soon as `holds()` is true, while the event loop runs; fail when it is not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"the condition did not hold within {seconds:g} s"
        await asyncio.sleep(POLL_SECONDS)
