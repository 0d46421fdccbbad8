"""Text completions."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable
from typing import Literal, Unpack, overload

from tok_client.mapping import AsyncMap, CompletionMapParams, Map
from tok_client.requests import COMPLETION, CompletionCreateParams, CompletionParams, Object, Prompt
from tok_client.resources.resource import AsyncResource, Resource, completions_of
from tok_client.transport import AsyncStream, Stream
from tok_client.types import Completion


class AsyncCompletions(AsyncResource):
    """The `/completions` endpoints."""

    @overload
    async def create(
        self, *, stream: Literal[False] = False, **params: Unpack[CompletionCreateParams]
    ) -> Completion: ...

    @overload
    async def create(
        self, *, stream: Literal[True], **params: Unpack[CompletionCreateParams]
    ) -> AsyncStream[Completion]: ...

    @overload
    async def create(
        self, *, stream: bool, **params: Unpack[CompletionCreateParams]
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
        """Complete all of `prompts`, possibly millions, with many requests open at a time.

        See `AsyncMap` for the results and `MapOptions` for the options. `key` returns a prompt's key, by which a
        later run continues an output file. The other parameters are those of `create`.
        """
        return self._map(prompts, completions_of, key, params, extra_body, timeout)


class Completions(Resource):
    """The `/completions` endpoints."""

    @overload
    def create(self, *, stream: Literal[False] = False, **params: Unpack[CompletionCreateParams]) -> Completion: ...

    @overload
    def create(self, *, stream: Literal[True], **params: Unpack[CompletionCreateParams]) -> Stream[Completion]: ...

    @overload
    def create(self, *, stream: bool, **params: Unpack[CompletionCreateParams]) -> Completion | Stream[Completion]: ...

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
        """Complete all of `prompts`, possibly millions, with many requests open at a time.

        See `Map` for the results and `MapOptions` for the options. `key` returns a prompt's key, by which a
        later run continues an output file. The other parameters are those of `create`.
        """
        return self._map(prompts, completions_of, key, params, extra_body, timeout)
