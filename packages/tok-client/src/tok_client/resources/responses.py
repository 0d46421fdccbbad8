"""Responses: answers in items, of which nothing is kept."""

from __future__ import annotations

from typing import Literal, Unpack, overload

from tok_client import calls
from tok_client.blocking import BlockingTransport
from tok_client.bodies import Object
from tok_client.params import ResponseParams
from tok_client.streaming import AsyncStream, Stream
from tok_client.transport import Transport
from tok_client.types import Response, ResponseEvent


class AsyncResponses:
    """`/responses`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    @overload
    async def create(
        self,
        *,
        stream: Literal[False] = False,
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[ResponseParams],
    ) -> Response: ...

    @overload
    async def create(
        self,
        *,
        stream: Literal[True],
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[ResponseParams],
    ) -> AsyncStream[ResponseEvent]: ...

    @overload
    async def create(
        self,
        *,
        stream: bool,
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[ResponseParams],
    ) -> Response | AsyncStream[ResponseEvent]: ...

    async def create(
        self,
        *,
        stream: bool = False,
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[ResponseParams],
    ) -> Response | AsyncStream[ResponseEvent]:
        """Answers `input`; with `stream`, gives an iterator of the events by which the response comes to be.

        The other parameters are those of the wire: see `ResponseRequest`. What is not given is not sent.
        `timeout` (seconds) takes the place of the client's; `extra_body` is added to the JSON body as it is.
        """
        if stream:
            return await self._transport.stream(calls.response_stream(params, extra_body), timeout)
        return await self._transport.fetch(calls.response(params, extra_body), timeout)


class Responses:
    """`/responses`."""

    def __init__(self, transport: BlockingTransport) -> None:
        self._transport = transport

    @overload
    def create(
        self,
        *,
        stream: Literal[False] = False,
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[ResponseParams],
    ) -> Response: ...

    @overload
    def create(
        self,
        *,
        stream: Literal[True],
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[ResponseParams],
    ) -> Stream[ResponseEvent]: ...

    @overload
    def create(
        self,
        *,
        stream: bool,
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[ResponseParams],
    ) -> Response | Stream[ResponseEvent]: ...

    def create(
        self,
        *,
        stream: bool = False,
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[ResponseParams],
    ) -> Response | Stream[ResponseEvent]:
        """Answers `input`; with `stream`, gives an iterator of the events by which the response comes to be.

        The other parameters are those of the wire: see `ResponseRequest`. What is not given is not sent.
        `timeout` (seconds) takes the place of the client's; `extra_body` is added to the JSON body as it is.
        """
        if stream:
            return self._transport.stream(calls.response_stream(params, extra_body), timeout)
        return self._transport.fetch(calls.response(params, extra_body), timeout)
