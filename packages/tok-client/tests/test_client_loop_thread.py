"""The event loop behind the blocking client: what interrupts a call, and whose timeout it raises."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Iterator

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


def test_an_interrupt_that_does_not_wake_the_waiting_thread_ends_the_call_all_the_same(loop: LoopThread) -> None:
    # Like a signal that comes just before the wait, one that another thread receives interrupts no system call here.
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


def test_a_timeout_of_the_call_itself_is_raised_and_a_slow_call_is_waited_for(
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
