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
    """`/completions`."""

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
        """Completes `prompt`; with `stream`, gives an iterator of what it gains.

        The other parameters are those of the wire: see `CompletionRequest`. What is not given is not sent.
        `timeout` (seconds) takes the place of the client's; `extra_body` is added to the JSON body as it is.
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
        """Answers all of `prompts`, of which there may be millions, many at a time.

        See `AsyncMap` for the results, `MapOptions` for how it goes about it; `key` makes a key for each, by which an
        output is gone on with. The other parameters are those of `create`.
        """
        return self._map(prompts, completions_of, key, params, extra_body, timeout)


class Completions(Resource):
    """`/completions`."""

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
        """Completes `prompt`; with `stream`, gives an iterator of what it gains.

        The other parameters are those of the wire: see `CompletionRequest`. What is not given is not sent.
        `timeout` (seconds) takes the place of the client's; `extra_body` is added to the JSON body as it is.
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
        """Answers all of `prompts`, of which there may be millions, many at a time.

        See `Map` for the results, `MapOptions` for how it goes about it; `key` makes a key for each, by which an
        output is gone on with. The other parameters are those of `create`.
        """
        return self._map(prompts, completions_of, key, params, extra_body, timeout)
