"""Engine and AsyncEngine: the engine to embed, blocking and asynchronous."""

from __future__ import annotations

import asyncio
import queue
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from tok_core.assembly import OpenRequest
from tok_core.config import EngineConfig
from tok_core.core import EngineCore, Health
from tok_core.errors import InvalidField
from tok_core.messages import EngineInfo
from tok_core.outputs import Delta, RequestOutput
from tok_core.progress import Progressing, progress_bar
from tok_core.sampling import SamplingParams
from tok_core.text.template import ChatTemplate
from tok_core.text.tokenizer import Tokenizer

Prompt = str | list[int]
Params = SamplingParams | Sequence[SamplingParams]


class _Base:
    """What both engines have in common."""

    def __init__(self, config: EngineConfig, *, in_process: bool = False) -> None:
        self._core = EngineCore(config, in_process=in_process)

    @property
    def info(self) -> EngineInfo:
        """Sizes of model and cache, and every `auto` resolved."""
        return self._core.info

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None where only token ids can be served."""
        return self._core.tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The model's chat template, if it has one."""
        return self._core.chat_template

    def health(self) -> Health:
        """Whether requests are served now."""
        return self._core.health()

    def stats(self) -> dict[str, float]:
        """Counters since the start, and gauges."""
        return self._core.stats()


class Engine(_Base):
    """Generates for lists of prompts. Starts when constructed; a context manager.

    config      see `EngineConfig`
    in_process  manager and worker run in a thread of this process, not in processes of their own

    Raises ModelError, InvalidField or EngineError where it cannot start.
    """

    def __init__(self, config: EngineConfig, *, in_process: bool = False) -> None:
        super().__init__(config, in_process=in_process)
        try:
            self._core.start()
        except BaseException:
            self._core.close()
            raise

    def generate(
        self, prompts: Sequence[Prompt], params: Params | None = None, *, progress: bool = False
    ) -> list[RequestOutput]:
        """One output a prompt, in the order of the prompts; `params` are one for all or one each.

        Raises InvalidField before anything runs if any prompt cannot be served, EngineDead if a process dies.
        """
        outputs: list[RequestOutput | None] = [None] * len(prompts)
        for index, output in self._run(prompts, params, progress):
            outputs[index] = output
        return [output for output in outputs if output is not None]

    def stream(
        self, prompts: Sequence[Prompt], params: Params | None = None, *, progress: bool = False
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Index of the prompt and its output, in order of completion."""
        return self._run(prompts, params, progress)

    def close(self) -> None:
        """Ends the engine; open requests get EngineClosed."""
        self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(
        self, prompts: Sequence[Prompt], params: Params | None, progress: bool
    ) -> Iterator[tuple[int, RequestOutput]]:
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise InvalidField("prompts", prompts, "a list of prompts")
        each = _one_each(params, len(prompts))
        ids = [self._core.encode(prompt) for prompt in prompts]
        for prompt, one in zip(ids, each, strict=True):
            self._core.check(prompt, one)
        arrived: queue.SimpleQueue[tuple[OpenRequest, list[Delta]]] = queue.SimpleQueue()
        with progress_bar(progress, sum(one.n for one in each)) as bar:
            index: dict[int, int] = {}
            try:
                for i, (prompt, one) in enumerate(zip(ids, each, strict=True)):
                    index[self._core.submit(prompt, one, None, lambda *news: arrived.put(news)).rid] = i
                yield from self._collect(index, arrived, bar)
            finally:
                self._core.abort_all(index)

    def _collect(
        self,
        index: dict[int, int],
        arrived: queue.SimpleQueue[tuple[OpenRequest, list[Delta]]],
        bar: Progressing,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Yields each request when it is done, and takes it out of `index`."""
        ended = dict.fromkeys(index, 0)
        while index:
            request, deltas = arrived.get()
            bar.advance(deltas)
            if request.error is not None:
                raise request.error
            # Counted from the deltas: the request itself may be further than what has been taken in here.
            ended[request.rid] += sum(delta.finish_reason is not None for delta in deltas)
            if ended[request.rid] == request.params.n:
                yield index.pop(request.rid), request.output()


class RequestStream:
    """The deltas of one request while it runs: `async for delta in stream`, or the whole by `await stream.output()`.

    Deltas of its samples interleave. Raises EngineDead if a process dies. Leaving early? Call `abort`.
    """

    def __init__(self, core: EngineCore, loop: asyncio.AbstractEventLoop) -> None:
        self._core = core
        self._loop = loop
        self._arrived: asyncio.Queue[list[Delta]] = asyncio.Queue()
        self._unread: deque[Delta] = deque()
        self._left = 1  # samples whose last delta has not been read
        self._request: OpenRequest | None = None

    @property
    def request_id(self) -> str:
        """The id given, or one made for it."""
        return self._open.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt in tokens."""
        return self._open.prompt

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the cache; known with the first delta."""
        return self._open.cached_tokens

    def abort(self) -> None:
        """Ends the request, if it still runs: its samples finish with reason "abort"."""
        self._core.abort_all([self._open.rid])

    async def output(self) -> RequestOutput:
        """Waits for the whole request."""
        async for _ in self:
            pass
        return self._open.output()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self._deltas()

    async def _deltas(self) -> AsyncIterator[Delta]:
        while self._left:
            if not self._unread:
                if self._open.error is not None and self._arrived.empty():
                    raise self._open.error
                self._unread += await self._arrived.get()
                continue
            delta = self._unread.popleft()
            self._left -= delta.finish_reason is not None
            yield delta

    @property
    def _open(self) -> OpenRequest:
        assert self._request is not None
        return self._request

    def _sink(self, request: OpenRequest, deltas: list[Delta]) -> None:
        """On the reporting thread; a loop that has ended has nobody to tell."""
        with suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self._arrived.put_nowait, deltas)


class AsyncEngine(_Base):
    """Serves requests as they come. `start` it within a running event loop."""

    async def start(self) -> None:
        """Returns when ready. Raises ModelError, InvalidField or EngineError where it cannot start."""
        try:
            await asyncio.to_thread(self._core.start)
        except BaseException:
            await asyncio.to_thread(self._core.close)
            raise

    async def close(self, *, drain: float = 0.0) -> None:
        """Waits up to `drain` seconds for open requests, ends the others with EngineClosed, then the processes."""
        await asyncio.to_thread(self._core.close, drain)

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> RequestStream:
        """Submits one request. Raises InvalidField for what cannot be served, EngineDead while nothing is."""
        stream = RequestStream(self._core, asyncio.get_running_loop())
        params = params or SamplingParams()
        stream._left = params.n
        stream._request = self._core.submit(prompt, params, request_id, stream._sink)
        return stream

    async def abort(self, request_id: str) -> None:
        """Ends a request; its samples finish with reason "abort"."""
        self._core.abort(request_id)


def _one_each(params: Params | None, count: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
        raise InvalidField("params", params, "SamplingParams, or a list of them")
    if len(params) != count:
        raise InvalidField("params", f"{len(params)} of them", f"one, or one for each of {count} prompts")
    return list(params)
