"""Case: a piece of work to be timed, and the least that it moves and computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Case:
    """`run` moves at least `moved` bytes and does at least `operations`; `tokens` of a forward, where it stands for a
    whole one."""

    kernel: str
    size: str
    run: Callable[[], object]
    moved: int
    operations: int = 0
    tokens: int = 0
