"""An event loop on a separate thread, through which blocking code uses the async client."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

_STOP_SECONDS = 5.0  # upper bound on the wait for the thread to end

# A signal that arrives just before its thread begins to wait does not end the wait; this bounds the delay of Ctrl-C.
_SIGNAL_SECONDS = 0.5


class _OwnLoop(asyncio.SelectorEventLoop):
    """Event loop that counts as closed in a process forked from its own.

    Both processes share the selector. A connection that the forked process closed would be unregistered for both, and
    the next request of the first process on this connection would wait until its timeout.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        super().__init__()

    def is_closed(self) -> bool:
        return self._pid != os.getpid() or super().is_closed()

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self._pid == os.getpid():  # else it would report connections that are not the forked process's to close
            super().call_exception_handler(context)


class LoopThread:
    """Thread with an event loop that runs coroutines for blocking callers of any number of threads.

    The thread starts at the first call. `cleanup` is awaited when the loop stops: at `stop()`, when this object is
    garbage-collected, or at the interpreter's exit.
    """

    def __init__(self, cleanup: Callable[[], Coroutine[object, object, None]]) -> None:
        self._cleanup = cleanup
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._stopped = False
        self._finalizer: Callable[[], object] | None = None

    @property
    def stopped(self) -> bool:
        """Return whether `stop` has been called."""
        return self._stopped

    def call(self, function: Callable[[], Coroutine[object, object, T]]) -> T:
        """Run `function()` on the loop and wait for its result.

        An exception that interrupts the wait cancels the coroutine. RuntimeError: the loop was stopped before or during
        the call, the process was forked since the first call, or this is the loop's own thread.
        """
        if self._forked():  # first, because a thread of the other process may have held the lock at the fork
            raise RuntimeError("the client was created before this process was forked; create one client per process")
        if threading.current_thread() is self._thread:
            raise RuntimeError("a function that the client calls, such as the key of a map, cannot use the client")
        future: Future[T] = Future()
        try:
            with self._lock:  # so that `stop` cancels this coroutine, too
                # The loop's thread makes the coroutine: one made here would never be awaited if Ctrl-C came just then.
                self._running_loop().call_soon_threadsafe(_start, function, future)
            return _result(future)
        except CancelledError as error:
            raise RuntimeError("the client was closed during the call") from error
        except BaseException:
            future.cancel()
            raise

    def post(self, function: Callable[[], None]) -> None:
        """Schedule `function()` on the loop without waiting; does nothing if the loop has stopped."""
        if self._loop is not None and not self._forked():
            _post(self._loop, function)

    def stop(self) -> None:
        """Cancel all running coroutines, await `cleanup` and end the thread. Idempotent."""
        if self._forked():
            self._stopped = True
            return
        with self._lock:
            self._stopped = True
            finalizer = self._finalizer
        if finalizer is not None:
            finalizer()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._stopped:
            raise RuntimeError("the client is closed")
        if self._loop is None:
            self._loop = _OwnLoop()
            self._pid = os.getpid()
            self._thread = threading.Thread(target=_run, args=(self._loop,), name="tok-client", daemon=True)
            self._thread.start()
            self._finalizer = weakref.finalize(self, _stop, self._loop, self._thread, self._pid, self._cleanup)
        return self._loop

    def _forked(self) -> bool:
        """Return whether this process was forked from the one whose thread runs the loop."""
        return self._loop is not None and self._pid != os.getpid()


def _start(function: Callable[[], Coroutine[object, object, T]], future: Future[T]) -> None:
    """Run `function()` as a task that gives its result to `future` and ends when `future` is cancelled."""
    if future.cancelled():
        return
    loop = asyncio.get_running_loop()
    try:
        task = loop.create_task(function())
    except Exception as error:
        with suppress(InvalidStateError):  # the caller has cancelled `future`
            future.set_exception(error)
        return
    task.add_done_callback(lambda _: _settle(task, future))

    def follow(_: Future[T]) -> None:
        if future.cancelled():
            _post(loop, task.cancel)

    future.add_done_callback(follow)


def _settle(task: asyncio.Task[T], future: Future[T]) -> None:
    """Give the task's result or exception to `future`."""
    with suppress(InvalidStateError):  # the caller has cancelled `future`
        if task.cancelled():
            future.cancel()
        elif (error := task.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(task.result())


def _post(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    with suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(function)


def _result(future: Future[T]) -> T:
    """Wait for the result in short intervals, so that signals are noticed."""
    while True:
        try:
            return future.result(_SIGNAL_SECONDS)
        except TimeoutError:
            if future.done():
                return future.result()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


def _stop(
    loop: asyncio.AbstractEventLoop,
    thread: threading.Thread,
    pid: int,
    cleanup: Callable[[], Coroutine[object, object, None]],
) -> None:
    if pid != os.getpid():  # a forked process has the loop but not its thread
        return
    asyncio.run_coroutine_threadsafe(_finish(loop, cleanup), loop)
    if threading.current_thread() is not thread:  # the garbage collector may run on any thread
        thread.join(_STOP_SECONDS)


async def _finish(loop: asyncio.AbstractEventLoop, cleanup: Callable[[], Coroutine[object, object, None]]) -> None:
    others = asyncio.all_tasks(loop) - {asyncio.current_task(loop)}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    try:
        await cleanup()
    finally:
        loop.stop()
