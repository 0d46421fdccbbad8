"""Endpoints for trainers, which a server serves with --enable-rl: generate, pause, sleep, load other weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Literal, Unpack, overload

from tok_client.requests import TokenGenerationCreateParams, TokenGenerationParams, calls
from tok_client.resources.resource import AsyncResource, Resource
from tok_client.transport import AsyncStream, Stream
from tok_client.types import CacheReset, EngineStatus, TokenGeneration

PauseMode = Literal["keep", "wait", "abort"]


class AsyncRL(AsyncResource):
    """Endpoints for trainers, served below the server's root. PermissionDeniedError: without --enable-rl."""

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
        return await self._transport.fetch(calls.RESUME, timeout)

    async def is_paused(self, *, timeout: float | None = None) -> bool:
        """Return whether the engine is paused."""
        return (await self._transport.fetch(calls.PAUSED, timeout)).is_paused

    async def sleep(
        self, level: Literal[1, 2] = 1, *, mode: PauseMode = "abort", timeout: float | None = None
    ) -> EngineStatus:
        """Let the server give the memory of weights and KV cache back. It needs --enable-sleep-mode.

        level  of the weights. 1: keep a copy in the host's memory; 2: drop them
        mode   of open requests, as for `pause`
        """
        return await self._transport.fetch(calls.sleep(level, mode), timeout)

    async def wake_up(
        self, tags: Sequence[Literal["weights", "kv_cache"]] | None = None, *, timeout: float | None = None
    ) -> EngineStatus:
        """Let the server take memory again; None: all of it."""
        return await self._transport.fetch(calls.wake_up(tags), timeout)

    async def is_sleeping(self, *, timeout: float | None = None) -> bool:
        """Return whether any of the server's memory is given back."""
        return (await self._transport.fetch(calls.SLEEPING, timeout)).is_sleeping

    async def update_weights(
        self,
        weight_dir: str | PathLike[str] | None = None,
        *,
        update_info: Mapping[str, object] | None = None,
        weight_version: str | None = None,
        timeout: float | None = None,
    ) -> EngineStatus:
        """Load the weights in a directory on the server's host, or receive tensors. BadRequestError: they are refused.

        update_info  names, dtype_names and shapes of tensors that the trainer broadcasts meanwhile, or that
                     `tok_core.worker.transfer.export_tensors` exports; see `UpdateInfo`
        """
        return await self._transport.fetch(calls.weights_update(weight_dir, weight_version, update_info), timeout)

    async def init_weight_transfer(
        self, init_info: Mapping[str, object], *, timeout: float | None = None
    ) -> EngineStatus:
        """Let all workers join a group in which the trainer is rank 0; see `InitInfo`. The trainer joins meanwhile."""
        return await self._transport.fetch(calls.weight_transfer_init(init_info), timeout)

    async def start_weight_update(self, *, timeout: float | None = None) -> EngineStatus:
        """Open an update: tensors are staged until `finish_weight_update`."""
        return await self._transport.fetch(calls.WEIGHT_UPDATE_START, timeout)

    async def finish_weight_update(
        self, *, weight_version: str | None = None, timeout: float | None = None
    ) -> EngineStatus:
        """Apply what the update has staged, in all workers or none. BadRequestError: the update has failed."""
        return await self._transport.fetch(calls.weight_update_finish(weight_version), timeout)

    async def world_size(self, *, include_dp: bool = True, timeout: float | None = None) -> int:
        """Return the number of workers, of all replicas or of one."""
        return (await self._transport.fetch(calls.world_size(include_dp), timeout)).world_size

    async def weight_version(self, *, timeout: float | None = None) -> str:
        """Return the version of the weights."""
        return (await self._transport.fetch(calls.WEIGHT_VERSION, timeout)).weight_version

    async def reset_prefix_cache(self, *, timeout: float | None = None) -> CacheReset:
        """Forget cached prefixes; running requests keep theirs."""
        return await self._transport.fetch(calls.CACHE_RESET, timeout)

    @overload
    async def generate(
        self,
        token_ids: Sequence[int],
        sampling_params: Mapping[str, object],
        *,
        stream: Literal[False] = False,
        **params: Unpack[TokenGenerationCreateParams],
    ) -> TokenGeneration: ...

    @overload
    async def generate(
        self,
        token_ids: Sequence[int],
        sampling_params: Mapping[str, object],
        *,
        stream: Literal[True],
        **params: Unpack[TokenGenerationCreateParams],
    ) -> AsyncStream[TokenGeneration]: ...

    @overload
    async def generate(
        self,
        token_ids: Sequence[int],
        sampling_params: Mapping[str, object],
        *,
        stream: bool,
        **params: Unpack[TokenGenerationCreateParams],
    ) -> TokenGeneration | AsyncStream[TokenGeneration]: ...

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling_params: Mapping[str, object],
        *,
        stream: bool = False,
        timeout: float | None = None,
        **params: Unpack[TokenGenerationParams],
    ) -> TokenGeneration | AsyncStream[TokenGeneration]:
        """Return samples of a prompt of token ids, as token ids with the version of the weights.

        With `stream`, return an iterator over chunks, which hold new tokens.

        sampling_params  fields of `completions.create` that say how to sample, when to stop and what to report
        request_id       names the request in the answer, and for `abort_requests`
        cache_salt       requests share cached prefixes only if they have the same, such as a version of the weights
        stream_options   see `StreamOptions`: with `include_usage`, the last chunk has no choices but the usage
        """
        call = calls.token_generation(token_ids, sampling_params, params, stream=stream)
        if stream:
            return await self._transport.stream(call, timeout)
        return await self._transport.fetch(call, timeout)

    async def abort_requests(self, request_ids: Sequence[str], *, timeout: float | None = None) -> None:
        """Abort requests of `generate`; their samples end with reason "abort" and the tokens so far."""
        await self._transport.fetch(calls.requests_abort(request_ids), timeout)


class RL(Resource):
    """Endpoints for trainers, served below the server's root. PermissionDeniedError: without --enable-rl."""

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
        return self._transport.fetch(calls.RESUME, timeout)

    def is_paused(self, *, timeout: float | None = None) -> bool:
        """Return whether the engine is paused."""
        return (self._transport.fetch(calls.PAUSED, timeout)).is_paused

    def sleep(
        self, level: Literal[1, 2] = 1, *, mode: PauseMode = "abort", timeout: float | None = None
    ) -> EngineStatus:
        """Let the server give the memory of weights and KV cache back. It needs --enable-sleep-mode.

        level  of the weights. 1: keep a copy in the host's memory; 2: drop them
        mode   of open requests, as for `pause`
        """
        return self._transport.fetch(calls.sleep(level, mode), timeout)

    def wake_up(
        self, tags: Sequence[Literal["weights", "kv_cache"]] | None = None, *, timeout: float | None = None
    ) -> EngineStatus:
        """Let the server take memory again; None: all of it."""
        return self._transport.fetch(calls.wake_up(tags), timeout)

    def is_sleeping(self, *, timeout: float | None = None) -> bool:
        """Return whether any of the server's memory is given back."""
        return (self._transport.fetch(calls.SLEEPING, timeout)).is_sleeping

    def update_weights(
        self,
        weight_dir: str | PathLike[str] | None = None,
        *,
        update_info: Mapping[str, object] | None = None,
        weight_version: str | None = None,
        timeout: float | None = None,
    ) -> EngineStatus:
        """Load the weights in a directory on the server's host, or receive tensors. BadRequestError: they are refused.

        update_info  names, dtype_names and shapes of tensors that the trainer broadcasts meanwhile, or that
                     `tok_core.worker.transfer.export_tensors` exports; see `UpdateInfo`
        """
        return self._transport.fetch(calls.weights_update(weight_dir, weight_version, update_info), timeout)

    def init_weight_transfer(self, init_info: Mapping[str, object], *, timeout: float | None = None) -> EngineStatus:
        """Let all workers join a group in which the trainer is rank 0; see `InitInfo`. The trainer joins meanwhile."""
        return self._transport.fetch(calls.weight_transfer_init(init_info), timeout)

    def start_weight_update(self, *, timeout: float | None = None) -> EngineStatus:
        """Open an update: tensors are staged until `finish_weight_update`."""
        return self._transport.fetch(calls.WEIGHT_UPDATE_START, timeout)

    def finish_weight_update(self, *, weight_version: str | None = None, timeout: float | None = None) -> EngineStatus:
        """Apply what the update has staged, in all workers or none. BadRequestError: the update has failed."""
        return self._transport.fetch(calls.weight_update_finish(weight_version), timeout)

    def world_size(self, *, include_dp: bool = True, timeout: float | None = None) -> int:
        """Return the number of workers, of all replicas or of one."""
        return (self._transport.fetch(calls.world_size(include_dp), timeout)).world_size

    def weight_version(self, *, timeout: float | None = None) -> str:
        """Return the version of the weights."""
        return (self._transport.fetch(calls.WEIGHT_VERSION, timeout)).weight_version

    def reset_prefix_cache(self, *, timeout: float | None = None) -> CacheReset:
        """Forget cached prefixes; running requests keep theirs."""
        return self._transport.fetch(calls.CACHE_RESET, timeout)

    @overload
    def generate(
        self,
        token_ids: Sequence[int],
        sampling_params: Mapping[str, object],
        *,
        stream: Literal[False] = False,
        **params: Unpack[TokenGenerationCreateParams],
    ) -> TokenGeneration: ...

    @overload
    def generate(
        self,
        token_ids: Sequence[int],
        sampling_params: Mapping[str, object],
        *,
        stream: Literal[True],
        **params: Unpack[TokenGenerationCreateParams],
    ) -> Stream[TokenGeneration]: ...

    @overload
    def generate(
        self,
        token_ids: Sequence[int],
        sampling_params: Mapping[str, object],
        *,
        stream: bool,
        **params: Unpack[TokenGenerationCreateParams],
    ) -> TokenGeneration | Stream[TokenGeneration]: ...

    def generate(
        self,
        token_ids: Sequence[int],
        sampling_params: Mapping[str, object],
        *,
        stream: bool = False,
        timeout: float | None = None,
        **params: Unpack[TokenGenerationParams],
    ) -> TokenGeneration | Stream[TokenGeneration]:
        """Return samples of a prompt of token ids, as token ids with the version of the weights.

        With `stream`, return an iterator over chunks, which hold new tokens.

        sampling_params  fields of `completions.create` that say how to sample, when to stop and what to report
        request_id       names the request in the answer, and for `abort_requests`
        cache_salt       requests share cached prefixes only if they have the same, such as a version of the weights
        stream_options   see `StreamOptions`: with `include_usage`, the last chunk has no choices but the usage
        """
        call = calls.token_generation(token_ids, sampling_params, params, stream=stream)
        if stream:
            return self._transport.stream(call, timeout)
        return self._transport.fetch(call, timeout)

    def abort_requests(self, request_ids: Sequence[str], *, timeout: float | None = None) -> None:
        """Abort requests of `generate`; their samples end with reason "abort" and the tokens so far."""
        self._transport.fetch(calls.requests_abort(request_ids), timeout)
