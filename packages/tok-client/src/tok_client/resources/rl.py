"""Endpoints for trainers, which a server serves with --enable-rl: pause, resume, load other weights."""

from __future__ import annotations

from os import PathLike
from typing import Literal

from tok_client.requests import calls
from tok_client.transport import BlockingTransport, Transport
from tok_client.types import CacheReset, EngineStatus

PauseMode = Literal["keep", "wait", "abort"]


class AsyncRL:
    """Endpoints for trainers, served below the server's root. PermissionDeniedError: without --enable-rl."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def pause(
        self, mode: PauseMode = "abort", *, clear_cache: bool | None = None, timeout: float | None = None
    ) -> EngineStatus:
        """Pause the engine; return once it computes nothing.

        mode         of open requests: "keep" them for `resume`, "wait" for their ends, or "abort" them
        clear_cache  forget cached prefixes; None: unless the mode is "keep"
        """
        return await self._transport.fetch(calls.pause(mode, clear_cache), timeout)

    async def resume(self, *, timeout: float | None = None) -> EngineStatus:
        """Resume the engine."""
        return await self._transport.fetch(calls.resume(), timeout)

    async def is_paused(self, *, timeout: float | None = None) -> bool:
        """Return whether the engine is paused."""
        return (await self._transport.fetch(calls.paused(), timeout)).is_paused

    async def update_weights(
        self, weight_dir: str | PathLike[str], *, weight_version: str | None = None, timeout: float | None = None
    ) -> EngineStatus:
        """Load the weights in a directory on the server's host. BadRequestError: they cannot be loaded."""
        return await self._transport.fetch(calls.weights_update(weight_dir, weight_version), timeout)

    async def weight_version(self, *, timeout: float | None = None) -> str:
        """Return the version of the weights."""
        return (await self._transport.fetch(calls.weight_version(), timeout)).weight_version

    async def reset_prefix_cache(self, *, timeout: float | None = None) -> CacheReset:
        """Forget cached prefixes; running requests keep theirs."""
        return await self._transport.fetch(calls.cache_reset(), timeout)


class RL:
    """Endpoints for trainers, served below the server's root. PermissionDeniedError: without --enable-rl."""

    def __init__(self, transport: BlockingTransport) -> None:
        self._transport = transport

    def pause(
        self, mode: PauseMode = "abort", *, clear_cache: bool | None = None, timeout: float | None = None
    ) -> EngineStatus:
        """Pause the engine; return once it computes nothing.

        mode         of open requests: "keep" them for `resume`, "wait" for their ends, or "abort" them
        clear_cache  forget cached prefixes; None: unless the mode is "keep"
        """
        return self._transport.fetch(calls.pause(mode, clear_cache), timeout)

    def resume(self, *, timeout: float | None = None) -> EngineStatus:
        """Resume the engine."""
        return self._transport.fetch(calls.resume(), timeout)

    def is_paused(self, *, timeout: float | None = None) -> bool:
        """Return whether the engine is paused."""
        return (self._transport.fetch(calls.paused(), timeout)).is_paused

    def update_weights(
        self, weight_dir: str | PathLike[str], *, weight_version: str | None = None, timeout: float | None = None
    ) -> EngineStatus:
        """Load the weights in a directory on the server's host. BadRequestError: they cannot be loaded."""
        return self._transport.fetch(calls.weights_update(weight_dir, weight_version), timeout)

    def weight_version(self, *, timeout: float | None = None) -> str:
        """Return the version of the weights."""
        return (self._transport.fetch(calls.weight_version(), timeout)).weight_version

    def reset_prefix_cache(self, *, timeout: float | None = None) -> CacheReset:
        """Forget cached prefixes; running requests keep theirs."""
        return self._transport.fetch(calls.cache_reset(), timeout)
