"""Text completions."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable
from typing import Literal, Unpack, overload

from tok_client.mapping import AsyncMap, CompletionMapParams, Map, completions_of
from tok_client.requests import COMPLETION, CompletionParams, Object, Prompt
from tok_client.resources.resource import AsyncResource, Resource
from tok_client.transport import AsyncStream, Stream
from tok_client.types import Completion


class AsyncCompletions(AsyncResource):
    """The `/completions` endpoints."""

    @overload
    async def create(
        self,
        *,
        stream: Literal[False] = False,
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[CompletionParams],
    ) -> Completion: ...

    @overload
    async def create(
        self,
        *,
        stream: Literal[True],
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[CompletionParams],
    ) -> AsyncStream[Completion]: ...

    @overload
    async def create(
        self,
        *,
        stream: bool,
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[CompletionParams],
    ) -> Completion | AsyncStream[Completion]: ...

    async def create(
        self,
        *,
        stream: bool = False,
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[CompletionParams],
    ) -> Completion | AsyncStream[Completion]:
        """Complete `prompt`; with `stream`, return an iterator over the chunks of the completion.

        The other parameters are those of the API: see `CompletionRequest`. Parameters not given are not sent. `timeout`
        (seconds) replaces the client's; the members of `extra_body` are added to the JSON body unchanged.
        """
        return await self._generate(COMPLETION, params, extra_body, timeout, stream=stream)

    def map(
        self,
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        *,
        key: Callable[[Prompt], str] | None = None,
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[CompletionMapParams],
    ) -> AsyncMap[Prompt, Completion]:
        """Complete all of `prompts`, of which there may be millions, with many requests open at a time.

        See `AsyncMap` for the results and `MapOptions` for the options. `key` returns a prompt's key, by which a
        later run continues an output file. The other parameters are those of `create`.
        """
        return self._map(prompts, completions_of, key, params, extra_body, timeout)


class Completions(Resource):
    """The `/completions` endpoints."""

    @overload
    def create(
        self,
        *,
        stream: Literal[False] = False,
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[CompletionParams],
    ) -> Completion: ...

    @overload
    def create(
        self,
        *,
        stream: Literal[True],
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[CompletionParams],
    ) -> Stream[Completion]: ...

    @overload
    def create(
        self,
        *,
        stream: bool,
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[CompletionParams],
    ) -> Completion | Stream[Completion]: ...

    def create(
        self,
        *,
        stream: bool = False,
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[CompletionParams],
    ) -> Completion | Stream[Completion]:
        """Complete `prompt`; with `stream`, return an iterator over the chunks of the completion.

        The other parameters are those of the API: see `CompletionRequest`. Parameters not given are not sent. `timeout`
        (seconds) replaces the client's; the members of `extra_body` are added to the JSON body unchanged.
        """
        return self._generate(COMPLETION, params, extra_body, timeout, stream=stream)

    def map(
        self,
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        *,
        key: Callable[[Prompt], str] | None = None,
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[CompletionMapParams],
    ) -> Map[Prompt, Completion]:
        """Complete all of `prompts`, of which there may be millions, with many requests open at a time.

        See `Map` for the results and `MapOptions` for the options. `key` returns a prompt's key, by which a
        later run continues an output file. The other parameters are those of `create`.
        """
        return self._map(prompts, completions_of, key, params, extra_body, timeout)
