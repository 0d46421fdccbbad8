"""Shorten pauses that hold up all requests at once: garbage collection and long turns of other threads."""

from __future__ import annotations

import sys

from tok_core.runtime import settle

SWITCH_INTERVAL_SECONDS = 0.001  # seconds for which a thread may hold the GIL while others want it


def shorten_pauses() -> None:
    """Collect garbage less often (`tok_core.runtime.garbage_collection`); let threads yield to the event loop sooner.

    Call this once everything is loaded.
    """
    settle()
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
