"""The Responses API without stored state: answers consist of items."""

from __future__ import annotations

from typing import Literal, Unpack, overload

from tok_client.requests import RESPONSE, Object, ResponseCreateParams, ResponseParams
from tok_client.resources.resource import AsyncResource, Resource
from tok_client.transport import AsyncStream, Stream
from tok_client.types import Response, ResponseEvent


class AsyncResponses(AsyncResource):
    """The `/responses` endpoints."""

    @overload
    async def create(self, *, stream: Literal[False] = False, **params: Unpack[ResponseCreateParams]) -> Response: ...

    @overload
    async def create(
        self, *, stream: Literal[True], **params: Unpack[ResponseCreateParams]
    ) -> AsyncStream[ResponseEvent]: ...

    @overload
    async def create(
        self, *, stream: bool, **params: Unpack[ResponseCreateParams]
    ) -> Response | AsyncStream[ResponseEvent]: ...

    async def create(
        self,
        *,
        stream: bool = False,
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[ResponseParams],
    ) -> Response | AsyncStream[ResponseEvent]:
        """Answer `input`; with `stream`, return an iterator over the events of the response.

        The other parameters are those of the API: see `ResponseRequest`. Parameters not given are not sent. `timeout`
        (seconds) replaces the client's; the members of `extra_body` are added to the JSON body unchanged.
        """
        return await self._generate(RESPONSE, params, extra_body, timeout, stream=stream)


class Responses(Resource):
    """The `/responses` endpoints."""

    @overload
    def create(self, *, stream: Literal[False] = False, **params: Unpack[ResponseCreateParams]) -> Response: ...

    @overload
    def create(self, *, stream: Literal[True], **params: Unpack[ResponseCreateParams]) -> Stream[ResponseEvent]: ...

    @overload
    def create(self, *, stream: bool, **params: Unpack[ResponseCreateParams]) -> Response | Stream[ResponseEvent]: ...

    def create(
        self,
        *,
        stream: bool = False,
        timeout: float | None = None,
        extra_body: Object | None = None,
        **params: Unpack[ResponseParams],
    ) -> Response | Stream[ResponseEvent]:
        """Answer `input`; with `stream`, return an iterator over the events of the response.

        The other parameters are those of the API: see `ResponseRequest`. Parameters not given are not sent. `timeout`
        (seconds) replaces the client's; the members of `extra_body` are added to the JSON body unchanged.
        """
        return self._generate(RESPONSE, params, extra_body, timeout, stream=stream)
