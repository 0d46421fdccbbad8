"""Measure the private memory of a process tree, independently of other processes."""

from __future__ import annotations

import psutil


def own_memory(pid: int) -> int:
    """Return the anonymous memory of process `pid` and its descendants in bytes: heaps, stacks, modified pages, swap.

    psutil's `uss` would also count the pages of libraries that no other process maps. With torch these are 200 MiB,
    which a process appears to gain when another process with torch ends.
    """
    one = psutil.Process(pid)
    maps = (each for process in (one, *one.children(recursive=True)) for each in process.memory_maps())
    return sum(each.anonymous + each.swap for each in maps)
