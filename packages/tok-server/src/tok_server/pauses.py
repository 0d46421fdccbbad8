"""Pauses: what holds up every request of a server at once, and is not of its own making, is kept short."""

from __future__ import annotations

import sys

from tok_core.garbage_collection import settle

SWITCH = 0.001  # seconds for which a thread may keep the interpreter from others that want it


def keep_short() -> None:
    """To be called once all is loaded. Garbage is collected less often (`tok_core.garbage_collection`), and threads
    hand the interpreter to the event loop sooner than by default.
    """
    settle()
    sys.setswitchinterval(SWITCH)
