"""Responses: answers in items, of which nothing is kept."""

from __future__ import annotations

from typing import Literal, Unpack, overload

from tok_client.requests import RESPONSE, Object, ResponseParams
from tok_client.resources.resource import AsyncResource, Resource
from tok_client.transport import AsyncStream, Stream
from tok_client.types import Response, ResponseEvent


class AsyncResponses(AsyncResource):
    """`/responses`."""

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
        return await self._generate(RESPONSE, params, extra_body, timeout, stream=stream)


class Responses(Resource):
    """`/responses`."""

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
        return self._generate(RESPONSE, params, extra_body, timeout, stream=stream)
