"""LoopThrottle: admit a limited number of requests per turn of the event loop, so that others are not delayed."""

from __future__ import annotations

import asyncio
from collections import deque

MAX_REQUESTS_PER_TURN = 16  # each takes about 0.2 ms. Fewer would reach the engine in smaller groups, at a higher cost


class LoopThrottle:
    """Admission limit of one event loop: requests beyond `max_requests` wait for the next turn, in order of arrival."""

    def __init__(self, max_requests: int = MAX_REQUESTS_PER_TURN) -> None:
        self._max_requests = self._remaining = max_requests
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def admit(self) -> None:
        """Wait until the request may begin."""
        if self._remaining == self._max_requests:
            asyncio.get_running_loop().call_soon(self._begin_turn)
        if self._remaining:
            self._remaining -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _begin_turn(self) -> None:
        """Begin a new turn of the loop: admit the requests that have waited longest."""
        self._remaining = self._max_requests
        while self._waiting and self._remaining:
            turn = self._waiting.popleft()
            if not turn.done():  # else it was cancelled
                turn.set_result(None)
                self._remaining -= 1
        if self._remaining < self._max_requests:
            asyncio.get_running_loop().call_soon(self._begin_turn)
