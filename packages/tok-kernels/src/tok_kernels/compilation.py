"""List the Triton kernels that this process compiles or loads from disk."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

_builds: list[str] | None = None


def kernel_builds() -> list[str]:
    """Return the list to which each kernel is appended when it was built, such as "rope_kernel (compiled, 0.81 s)".

    All calls return the same list. It stays empty without Triton.
    """
    global _builds
    if _builds is None:
        _builds = []
        if find_spec("triton") is not None:
            _listen(_builds)
    return _builds


def _listen(builds: list[str]) -> None:
    compilation: Any = import_module("triton.knobs").compilation
    before = compilation.listener

    def listen(*, src: Any, times: Any, cache_hit: bool, **others: Any) -> None:
        builds.append(f"{src.name} ({'loaded' if cache_hit else 'compiled'}, {times.total / 1e6:.2f} s)")
        if before is not None:
            before(src=src, times=times, cache_hit=cache_hit, **others)

    compilation.listener = listen
