"""Bytes of memory that a process and its descendants hold for themselves, whatever else runs."""

from __future__ import annotations

import psutil


def own_memory(pid: int) -> int:
    """Anonymous memory of process `pid` and its descendants, in bytes: heaps, stacks, pages changed; swapped out, too.

    Not psutil's `uss`, which has all pages that no other process maps: those of a library are of a process as long as
    it is the only one to use it. With torch that is 200 MiB, which a process gains when another one with torch ends.
    """
    one = psutil.Process(pid)
    maps = (each for process in (one, *one.children(recursive=True)) for each in process.memory_maps())
    return sum(each.anonymous + each.swap for each in maps)
