"""Read how much memory is free on this host, or in the control groups (containers) that this process belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

OWN_GROUPS = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")
# Files of a limit and of the use, and entries of memory.stat for file caches, which the kernel drops when needed.
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
VERSION_2 = ("memory.max", "memory.current", ("active_file", "inactive_file"))


def available_memory() -> int:
    """Return the bytes that processes can still allocate: the host's, or fewer if a control group has a limit."""
    return max(0, min((int(psutil.virtual_memory().available), *_free_in_groups())))


def _free_in_groups() -> Iterator[int]:
    """Yield the free bytes of each control group that has a limit: this process's group and those around it."""
    with suppress(OSError):  # no Linux
        for line in OWN_GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            root, names = (GROUPS / "memory", VERSION_1) if controllers else (GROUPS, VERSION_2)
            group = root / path.lstrip("/")  # within a container, the path may be the host's; its end is the root then
            for folder in (group, *group.parents):
                yield from _free_in_group(folder, *names)
                if folder == root:
                    break


def _free_in_group(folder: Path, limit: str, used: str, caches: tuple[str, ...]) -> Iterator[int]:
    with suppress(OSError, ValueError):  # this group has no limit: the file does not exist, or contains "max"
        allowed = int((folder / limit).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        yield allowed - int((folder / used).read_text()) + sum(int(stat.get(name, 0)) for name in caches)


def memory_of_siblings() -> int:
    """Return the sum, over processes of the same parent, of the private bytes that each holds beyond this process's."""
    own = psutil.Process()
    parent = own.parent()
    siblings = [] if parent is None else parent.children()
    return sum(max(0, _private_bytes(sibling) - _private_bytes(own)) for sibling in siblings)


def _private_bytes(process: psutil.Process) -> int:
    try:
        memory = process.memory_info()
    except psutil.Error:  # it has ended
        return 0
    return int(memory.rss - getattr(memory, "shared", 0))
