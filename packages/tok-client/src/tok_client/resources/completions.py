"""Text completions."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable
from typing import Literal, Unpack, cast, overload

from tok_client import calls
from tok_client.blocking import BlockingTransport
from tok_client.bodies import Object
from tok_client.mapping.inputs import completions_of
from tok_client.mapping.iterate import AsyncMap, Map
from tok_client.mapping.options import CompletionMapParams, MapOptions
from tok_client.mapping.run import MapRun
from tok_client.params import CompletionParams, Prompt
from tok_client.streaming import AsyncStream, Stream
from tok_client.transport import Transport
from tok_client.types import Completion


class AsyncCompletions:
    """`/completions`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

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
        if stream:
            return await self._transport.stream(calls.completion_stream(params, extra_body), timeout)
        return await self._transport.fetch(calls.completion(params, extra_body), timeout)

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
        options, rest = MapOptions.split(cast(Object, params))
        make = completions_of(rest, extra_body)
        return AsyncMap(MapRun(self._transport, prompts, make, key, options, timeout))


class Completions:
    """`/completions`."""

    def __init__(self, transport: BlockingTransport) -> None:
        self._transport = transport

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
        if stream:
            return self._transport.stream(calls.completion_stream(params, extra_body), timeout)
        return self._transport.fetch(calls.completion(params, extra_body), timeout)

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
        options, rest = MapOptions.split(cast(Object, params))
        make = completions_of(rest, extra_body)
        return Map(MapRun(self._transport.transport, prompts, make, key, options, timeout), self._transport.thread)
