"""Gate: hold work back while the engine restarts, with one watcher for all waiting tasks."""

from __future__ import annotations

import asyncio

from tok_core import AsyncEngine, EngineClosed

CHECK_SECONDS = 0.1  # seconds between checks of the engine's health


class EngineGate:
    """A gate that is open while the engine serves.

    until_closed  True: also wait for a failed engine, since an operator may restart it; False: failed is final
    """

    def __init__(self, engine: AsyncEngine, *, until_closed: bool) -> None:
        self._engine = engine
        self._ended = ("closed",) if until_closed else ("closed", "failed")
        self._watcher: asyncio.Task[None] | None = None

    async def wait(self) -> None:
        """Wait until the engine serves. Raises EngineClosed once it never will again."""
        if self._open():
            return
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch())
        await asyncio.shield(self._watcher)

    def close(self) -> None:
        """Cancel the watcher."""
        if self._watcher is not None:
            self._watcher.cancel()

    async def _watch(self) -> None:
        while not self._open():
            await asyncio.sleep(CHECK_SECONDS)

    def _open(self) -> bool:
        health = self._engine.health()
        if health.state in self._ended:
            raise EngineClosed(health.detail or f"the engine is {health.state}")
        return health.ok
