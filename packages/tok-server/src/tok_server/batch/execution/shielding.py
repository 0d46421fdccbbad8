"""Await work to its end even if the awaiting task is cancelled: threads cannot be stopped halfway."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import TypeVar

T = TypeVar("T")


async def uninterrupted(work: Coroutine[object, object, T]) -> T:
    """Return the result of `work`. If cancelled, however often, raise CancelledError only after `work` has ended."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled() and (failure := task.exception()) is not None:
            cancelled.__context__ = failure
        raise cancelled
    return task.result()


async def run_in(executor: Executor, function: Callable[[], T]) -> T:
    """Return the result of `function`, called in `executor`. If cancelled, `function` still runs to its end."""
    return await asyncio.shield(asyncio.get_running_loop().run_in_executor(executor, function))
