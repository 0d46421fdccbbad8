"""Profile a manager by timing its methods from outside.

While a manager is profiled, methods are replaced by name with wrappers that read a clock, and put back afterwards. A
manager that is not profiled has no overhead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce, wraps
from typing import Final, Literal, ParamSpec, TypeVar, get_args

from tok_core.manager import BatchBuilder, Manager

Part = Literal["schedule", "pages", "forecast", "groups", "messages", "outputs", "stops", "rest"]
PARTS: Final[tuple[Part, ...]] = get_args(Part)

TIMED: Final[dict[str, Part]] = {
    "turn": "rest",
    "intake.*": "schedule",
    "_send_step": "schedule",
    "_take_output": "outputs",
    "_report": "messages",
    "ports.*": "messages",
    "output_processor.expect": "messages",
    "BatchBuilder.build": "messages",
    "scheduler._grow_decoders": "pages",
    "scheduler._find_groups": "groups",
    "scheduler.starter.*": "schedule",
    "paging.*": "pages",
    "paging.copies.*": "pages",
    "scheduler.retained_prompts.*": "pages",
    "scheduler.admission.*": "forecast",
    "lengths.*": "forecast",
    "stops.*": "stops",
    "table.claim": "schedule",
    "table.claim_one": "schedule",
}
"""Paths of methods, from the manager, and the part to which their time counts; `*`: all public methods of an object.

A BatchBuilder lives for one step, so the method is replaced on its class.
"""

P = ParamSpec("P")
T = TypeVar("T")


class ManagerProfiler:
    """Seconds by part. Nested calls into another part count to that part; nested calls within a part count once."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        self._clock = clock
        self._part: Part | None = None
        self._since = 0.0

    @contextmanager
    def timing(self, manager: Manager) -> Iterator[None]:
        """Time the methods of `manager` within this context. Raises AttributeError if one of TIMED does not exist."""
        found = [(owner, name, part) for path, part in TIMED.items() for owner, name in _methods(manager, path)]
        own = [vars(owner).get(name) for owner, name, _ in found]
        for owner, name, part in found:
            setattr(owner, name, self.timed(getattr(owner, name), part))
        try:
            yield
        finally:
            for (owner, name, _), method in zip(found, own, strict=True):
                if method is None:  # the owner's class defines the method
                    delattr(owner, name)
                else:
                    setattr(owner, name, method)

    def timed(self, method: Callable[P, T], part: Part) -> Callable[P, T]:
        """Return `method`, wrapped so that its time counts to `part`."""

        @wraps(method)
        def timed(*args: P.args, **kwargs: P.kwargs) -> T:
            outer = self._part
            if outer == part:
                return method(*args, **kwargs)
            self._turn_to(part)
            try:
                return method(*args, **kwargs)
            finally:
                self._turn_to(outer)

        return timed

    def _turn_to(self, part: Part | None) -> None:
        now = self._clock()
        if self._part is not None:
            self.seconds[self._part] += now - self._since
        self._part, self._since = part, now


def _methods(manager: Manager, path: str) -> list[tuple[object, str]]:
    """Return the objects and names of the methods that `path` stands for."""
    *way, name = path.split(".")
    owner: object = BatchBuilder if way == [BatchBuilder.__name__] else reduce(getattr, way, manager)
    if name != "*":
        return [(owner, name)]
    return [(owner, one) for one, what in vars(type(owner)).items() if callable(what) and not one.startswith("_")]
