"""Define Case: work to be timed, with the least bytes and operations that it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Case:
    """Work `run` that moves at least `moved` bytes and does at least `operations` operations.

    `tokens` is the number of tokens of a forward pass, if the case stands for a whole one; otherwise 0.
    """

    kernel: str
    size: str
    run: Callable[[], object]
    moved: int
    operations: int = 0
    tokens: int = 0
