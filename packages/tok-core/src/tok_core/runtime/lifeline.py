"""Lifelines: a child process exits when its parent's end of a pipe or socket closes, however the parent ended.

A process forked from the parent inherits a copy of that end and must not keep it open.
"""

from __future__ import annotations

import os
import socket
import weakref
from contextlib import suppress
from typing import IO

_KEPT: weakref.WeakSet[IO[bytes] | socket.socket] = weakref.WeakSet()


def keep_lifeline(end: IO[bytes] | socket.socket) -> None:
    """Close the copies of the parent's end in every process forked from this one."""
    _KEPT.add(end)


def _drop() -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for end in list(_KEPT):
        with suppress(ValueError):  # `end` is closed
            if (number := end.fileno()) >= 0:
                os.dup2(nowhere, number, inheritable=False)  # not closed: the owner of `end` closes the number later
    os.close(nowhere)


os.register_at_fork(after_in_child=_drop)
