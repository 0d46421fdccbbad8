"""Create temporary directories, and remove those of killed processes."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

MAX_PARENT_PATH_BYTES = 64  # of the parent's path; the path of a Unix socket inside may have some 107 bytes


class ScratchDirectory:
    """A temporary directory, locked for as long as it is used.

    The constructor first removes unlocked directories of the same kind and user: their processes were killed.

    kind  part of the directory's name
    name  path of the directory
    """

    def __init__(self, kind: str) -> None:
        parent = Path(tempfile.gettempdir() if len(tempfile.gettempdir()) < MAX_PARENT_PATH_BYTES else "/tmp")
        prefix = f"tok-{kind}-"
        _sweep(parent, re.compile(re.escape(prefix) + r"[a-z0-9_]{8}"))
        while True:
            self.name = tempfile.mkdtemp(prefix=prefix, dir=parent)
            self._lock = os.open(self.name, os.O_RDONLY | os.O_DIRECTORY)
            with suppress(OSError):  # the file system has no locks
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            if os.path.isdir(self.name):  # else another process has removed it before it was locked
                break
            os.close(self._lock)
        self._remove = weakref.finalize(self, _remove, self.name, self._lock, os.getpid())

    def cleanup(self) -> None:
        """Remove the directory; further calls do nothing."""
        self._remove()


def _remove(name: str, lock: int, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child
        shutil.rmtree(name, ignore_errors=True)
    os.close(lock)


def _sweep(parent: Path, names: re.Pattern[str]) -> None:
    with suppress(OSError):
        for entry in os.scandir(parent):
            if names.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                _remove_unlocked(entry)


def _remove_unlocked(entry: os.DirEntry[str]) -> None:
    with suppress(OSError):  # the directory is locked, or has been removed meanwhile
        if entry.stat(follow_symlinks=False).st_uid != os.getuid():
            return
        lock = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(entry.path, ignore_errors=True)
        finally:
            os.close(lock)
