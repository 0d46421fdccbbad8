"""Await a blocking call that runs in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def run_in_own_thread(call: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Return the result of a call that may block for minutes. If cancelled, the call still runs to its end.

    `asyncio.to_thread` has few threads for a whole event loop: a few such calls would keep all others waiting.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = call(*arguments, **options)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="blocking-call", daemon=True).start()
    return await asyncio.wrap_future(future)
