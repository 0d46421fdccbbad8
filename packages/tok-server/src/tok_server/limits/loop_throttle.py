"""LoopThrottle: admit a limited number of requests per turn of the event loop, so that others are not delayed."""

from __future__ import annotations

import asyncio
from collections import deque

MAX_REQUESTS_PER_TURN = 16  # requests; each takes some 0.2 ms. Fewer would reach the engine in pieces, and cost it more


class LoopThrottle:
    """Of one event loop. Requests beyond `most` wait for the next turn, first come, first served."""

    def __init__(self, most: int = MAX_REQUESTS_PER_TURN) -> None:
        self._most = self._left = most
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def begin(self) -> None:
        """Returns when it is the request's turn."""
        if self._left == self._most:
            asyncio.get_running_loop().call_soon(self._next)
        if self._left:
            self._left -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _next(self) -> None:
        """A new turn of the loop: it is that of those who have waited longest."""
        self._left = self._most
        while self._waiting and self._left:
            turn = self._waiting.popleft()
            if not turn.done():  # else it was cancelled
                turn.set_result(None)
                self._left -= 1
        if self._left < self._most:
            asyncio.get_running_loop().call_soon(self._next)
