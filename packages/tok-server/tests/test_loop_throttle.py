"""The server's event loop: LoopThrottle, deadlines, short pauses, and the choice of the loop."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Iterator

import pytest

from support.patience import PATIENCE
from tok_server.http.event_loop import SWITCH_INTERVAL_SECONDS, new_event_loop, run, shorten_pauses
from tok_server.http.request_limits import LoopThrottle, deadline
from tok_server.wire.errors import ApiError

LONG = 3600.0


def test_loop_throttle_admits_a_fixed_number_per_turn_in_order() -> None:
    async def begin() -> list[tuple[int, int]]:
        turns, begun, turn = LoopThrottle(3), [], 0

        async def one(number: int) -> None:
            await turns.admit()
            begun.append((number, turn))

        tasks = [asyncio.create_task(one(number)) for number in range(8)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            turn += 1
        return begun

    begun = asyncio.run(begin())
    assert [number for number, _ in begun] == list(range(8))
    turns = [turn for _, turn in begun]
    assert max(turns.count(turn) for turn in turns) == 3
    assert turns[-1] - turns[0] <= 4  # no request waits longer than the limit requires


def test_cancelled_waiter_uses_up_no_turn_of_loop_throttle() -> None:
    async def begin() -> list[int]:
        turns, begun = LoopThrottle(1), []

        async def one(number: int) -> None:
            await turns.admit()
            begun.append(number)

        tasks = [asyncio.create_task(one(number)) for number in range(4)]
        await asyncio.sleep(0)
        for cancelled in tasks[1:3]:
            cancelled.cancel()
        await asyncio.wait(tasks, timeout=PATIENCE)
        await asyncio.wait_for(one(4), PATIENCE)  # later requests do not wait
        return begun

    assert asyncio.run(begin()) == [0, 3, 4]


async def _keep(started: float, work: float) -> str:
    try:
        async with deadline(started, LONG):
            await asyncio.sleep(work)
    except ApiError as error:
        return f"{error.status}, {error.limit}"
    return "in time"


def test_each_request_has_its_own_deadline_in_any_order() -> None:
    async def several() -> list[str]:
        now = time.monotonic()
        soon, nearly, over = now - LONG + PATIENCE, now - LONG + 0.05, now - LONG - 1
        found = await asyncio.gather(
            *(_keep(now, 0.0), _keep(nearly, PATIENCE), _keep(now, 0.2)),
            *(_keep(over, PATIENCE), _keep(soon, 0.0), _keep(nearly - 0.04, PATIENCE)),
        )
        return list(found)

    late = "504, request_timeout"
    assert asyncio.run(several()) == ["in time", late, "in time", late, "in time", late]


def test_cancelled_request_does_not_raise_request_timeout() -> None:
    async def hold() -> None:
        async with deadline(time.monotonic(), 0.001):
            await asyncio.sleep(60)

    async def cancelled() -> None:
        task = asyncio.create_task(hold())
        await asyncio.sleep(0)
        time.sleep(0.005)
        task.cancel()  # before the loop looks at the deadline
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())


def test_deadline_passes_other_errors_unchanged() -> None:
    async def failing() -> None:
        async with deadline(time.monotonic(), LONG):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        asyncio.run(failing())


@pytest.fixture
def interpreter() -> Iterator[None]:
    switch, threshold = sys.getswitchinterval(), gc.get_threshold()
    yield
    sys.setswitchinterval(switch)
    gc.set_threshold(*threshold)
    gc.unfreeze()


@pytest.mark.usefixtures("interpreter")
def test_shorten_pauses_freezes_the_gc_and_shortens_thread_switches() -> None:
    shorten_pauses()
    assert gc.get_freeze_count() > 10_000
    assert gc.get_threshold()[0] > 700
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_SECONDS)
    ring: list[object] = []
    ring.append(ring)
    del ring
    assert gc.collect() >= 1  # later objects are collected as usual


@pytest.mark.parametrize("tls", [False, True])
def test_run_uses_the_fastest_event_loop_except_with_tls(tls: bool) -> None:
    async def which() -> type[asyncio.AbstractEventLoop]:
        await asyncio.sleep(0)
        return type(asyncio.get_running_loop())

    own = asyncio.new_event_loop()
    fastest = new_event_loop()
    assert run(which(), tls=tls) is (type(own) if tls else type(fastest))
    own.close()
    fastest.close()
