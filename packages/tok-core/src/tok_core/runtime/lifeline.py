"""Keep lifelines exclusive: processes forked from the parent of a child do not hold its end of the lifeline open.

A lifeline is a pipe or socket between parent and child. A child exits when the parent's end closes, however the parent
ended (`tok_core.replicas.processes.child`). A forked process inherits a copy of that end, which has to be closed too.
"""

from __future__ import annotations

import os
import socket
import weakref
from contextlib import suppress
from typing import IO

_CLOSED_IN_FORKS: weakref.WeakSet[IO[bytes] | socket.socket] = weakref.WeakSet()


def close_in_forks(end: IO[bytes] | socket.socket) -> None:
    """Close the copies of `end`, the parent's end of a lifeline, in every process forked from this one."""
    _CLOSED_IN_FORKS.add(end)


def _close_copies() -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for end in list(_CLOSED_IN_FORKS):
        with suppress(ValueError):  # `end` is closed
            if (number := end.fileno()) >= 0:
                os.dup2(nowhere, number, inheritable=False)  # not closed: the owner of `end` closes the number later
    os.close(nowhere)


os.register_at_fork(after_in_child=_close_copies)
