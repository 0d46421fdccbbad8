"""Tests of the event-loop thread behind the blocking client: interrupts and timeouts of calls."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
import threading
from collections.abc import Coroutine, Iterator

import pytest

from support.patience import PATIENCE, until
from tok_client.transport import loop_thread
from tok_client.transport.loop_thread import LoopThread


async def nothing() -> None:
    """Await nothing."""


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    one = LoopThread(nothing)
    yield one
    one.stop()


def test_sigint_in_another_thread_interrupts_a_blocking_call(loop: LoopThread) -> None:
    # A signal that another thread receives interrupts no system call here, like a signal just before the wait.
    waiting = threading.main_thread().ident
    assert waiting is not None
    uninterrupted: list[bool] = []

    async def interrupt() -> None:
        await until(lambda: sys._current_frames()[waiting].f_code is threading.Condition.wait.__code__)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        await asyncio.sleep(PATIENCE)
        uninterrupted.append(True)

    with pytest.raises(KeyboardInterrupt):
        loop.call(interrupt)
    assert not uninterrupted


def test_sigint_while_a_call_begins_leaves_no_unawaited_coroutine(
    loop: LoopThread, recwarn: pytest.WarningsRecorder
) -> None:
    waiting = threading.main_thread().ident
    assert waiting is not None

    def begin() -> Coroutine[object, object, None]:
        begun = nothing()
        signal.pthread_kill(waiting, signal.SIGINT)
        return begun

    with pytest.raises(KeyboardInterrupt):
        loop.call(begin)
    gc.collect()
    assert not recwarn.list


FORK = """
import os, signal, sys
from tok_client.transport.loop_thread import LoopThread
async def nothing(): pass
loop = LoopThread(nothing)
loop.call(nothing)
with loop._lock:  # as another thread may hold it while this one forks
    child = os.fork()
    if not child:
        signal.alarm(20)
        try: loop.call(nothing)
        except RuntimeError as error: print(error, flush=True)
        loop.stop()
        os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_does_not_wait_for_a_lock_of_its_parent() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "before this process was forked" in done.stdout


def test_a_call_from_the_loops_own_thread_is_refused(loop: LoopThread) -> None:
    async def nested() -> None:
        loop.call(nothing)

    with pytest.raises(RuntimeError, match="the key of a map, cannot use the client"):
        loop.call(nested)


def test_error_before_there_is_a_coroutine_reaches_the_caller(loop: LoopThread) -> None:
    def broken() -> Coroutine[object, object, None]:
        raise ValueError("no coroutine")

    with pytest.raises(ValueError, match="no coroutine"):
        loop.call(broken)


def test_blocking_calls_wait_and_raise_only_their_own_timeouts(
    loop: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_thread, "_SIGNAL_SECONDS", 0.001)

    async def late() -> str:
        await asyncio.sleep(0.05)
        return "late"

    async def timed_out() -> None:
        await asyncio.sleep(0.05)
        raise TimeoutError("its own")

    assert loop.call(late) == "late"
    with pytest.raises(TimeoutError, match="its own"):
        loop.call(timed_out)
