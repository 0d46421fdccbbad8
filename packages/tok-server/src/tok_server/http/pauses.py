"""Pauses: what holds up every request of a server at once, and is not of its own making, is kept short."""

from __future__ import annotations

import sys

from tok_core.runtime import settle

SWITCH = 0.001  # seconds for which a thread may keep the interpreter from others that want it


def keep_short() -> None:
    """Collect garbage less often (`tok_core.runtime.garbage_collection`); let threads yield to the event loop sooner.

    Call it once everything is loaded.
    """
    settle()
    sys.setswitchinterval(SWITCH)
