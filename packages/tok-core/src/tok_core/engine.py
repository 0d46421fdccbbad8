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
from tok_core.core import EngineCore
from tok_core.embedder import Embedder
from tok_core.errors import InvalidField
from tok_core.fleet import Health
from tok_core.grammar import Grammar
from tok_core.grammar.checker import refuse
from tok_core.messages import EngineInfo
from tok_core.outputs import Delta, EmbeddingOutput, Ending, Pooling, RequestOutput, TokenLogprob
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
        """Sizes of model and cache, and every `auto` resolved.

        With several replicas, pages and samples that run at once are those of all together; limits are the least.
        """
        return self._core.info

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None where only token ids can be served."""
        return self._core.tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The model's chat template, if it has one."""
        return self._core.chat_template

    @property
    def open_requests(self) -> int:
        """Requests that have not ended."""
        return self._core.open_requests

    def health(self) -> Health:
        """Whether requests are served now: by any replica, and by which."""
        return self._core.health()

    def stats(self) -> dict[str, float]:
        """Counters since the start, and gauges, of all replicas together; see `tok_core.messages.Stats`.

        `restarts` counts replicas started anew, `replicas` and `replicas_ready` what there are. A request whose samples
        were shared out among replicas counts in each.
        """
        return self._core.stats()

    def replica_stats(self) -> list[dict[str, float]]:
        """The same of each replica, by its number; `ready` is 1 where it serves, else 0."""
        return self._core.replica_stats()


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

    def embed(
        self,
        prompts: Sequence[Prompt],
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
        dimensions: int | None = None,
        priority: int = 0,
    ) -> list[EmbeddingOutput]:
        """The embedding of each prompt, float32 `[N]`, in the order of the prompts.

        pooling     of the hidden states behind the model's final norm: the last token's, or the mean of all tokens'
        normalize   to length 1
        dimensions  only the first so many are wanted, at most the model's hidden size N; None: all
        priority    as of `SamplingParams`

        Raises InvalidField before anything runs if any prompt cannot be embedded, EngineDead if a process dies.
        """
        return Embedder(self._core, prompts, pooling, normalize, dimensions, priority).run()

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
        for grammar in {one.grammar for one in each if one.grammar is not None}:
            refuse(grammar, self._core.verdict(grammar).result())
        arrived: queue.SimpleQueue[Sequence[OpenRequest]] = queue.SimpleQueue()
        with progress_bar(progress, sum(one.n for one in each)) as bar:
            index: dict[int, int] = {}
            try:
                for i, (prompt, one) in enumerate(zip(ids, each, strict=True)):
                    index[self._core.submit(prompt, one, None, arrived.put, stream=False).rid] = i
                yield from self._collect(index, arrived, bar)
            finally:
                self._core.abort_all(index)

    def _collect(
        self, index: dict[int, int], arrived: queue.SimpleQueue[Sequence[OpenRequest]], bar: Progressing
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Yields each request when it is done, and takes it out of `index`."""
        while index:
            for request in arrived.get():
                ended = request.ended()  # before: what it has by now is then all of it
                bar.advance(request.take())
                if request.error is not None:
                    raise request.error
                if ended and request.rid in index:
                    yield index.pop(request.rid), request.output()


class RequestStream:
    """The deltas of one request while it runs: `async for delta in stream`, or the whole by `await stream.output()`.

    Deltas of its samples interleave. Raises EngineDead if a process dies. Leaving early? Call `abort`.
    """

    def __init__(self, core: EngineCore, request: OpenRequest) -> None:
        self._core = core
        self._request = request
        self._news = asyncio.Event()
        self._unread: deque[Delta] = deque()
        self._left = request.params.n  # samples whose last delta has not been read

    @property
    def request_id(self) -> str:
        """The id given, or one made for it."""
        return self._request.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt in tokens."""
        return self._request.prompt

    @property
    def output_tokens(self) -> int:
        """Tokens that have been made for it, as far as they have been told: of all its samples."""
        return self._request.output_tokens

    @property
    def first_token(self) -> float | None:
        """When its first token came, on the monotonic clock."""
        return self._request.timings.first_token

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the cache; known with the first delta."""
        return self._request.cached_tokens

    @property
    def prompt_logprobs(self) -> list[TokenLogprob | None] | None:
        """Of the prompt's tokens, where the request asks for them; known with the first delta."""
        return self._request.prompt_logprobs()

    def abort(self, reason: Ending = "abort") -> None:
        """Ends the request, if it still runs: samples that have not finished do so now, with `reason`."""
        self._core.abort_all([self._request.rid], reason)

    async def output(self) -> RequestOutput:
        """Waits for the whole request."""
        async for _ in self.batches():
            pass
        return self._request.output()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self._deltas()

    async def batches(self) -> AsyncIterator[list[Delta]]:
        """The deltas, those together that were reported together."""
        while self._left:
            await self._wait()
            batch = list(self._unread)
            self._unread.clear()
            self._left -= sum(delta.finish_reason is not None for delta in batch)
            yield batch

    async def _deltas(self) -> AsyncIterator[Delta]:
        while self._left:
            await self._wait()
            delta = self._unread.popleft()
            self._left -= delta.finish_reason is not None
            yield delta

    async def _wait(self) -> None:
        """Returns when something is unread. Raises the request's error when there is nothing before it."""
        while not self._unread:
            self._news.clear()
            error = self._request.error  # before: what comes before it is then taken
            self._unread += self._request.take()
            if not self._unread:
                if error is not None:
                    raise error
                await self._news.wait()


class _Mailbox:
    """The streams of one event loop, which is woken once a report however many of them have news."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.streams: dict[int, RequestStream] = {}  # by rid, until their requests have ended

    def tell(self, requests: Sequence[OpenRequest]) -> None:
        """From any thread; a loop that has ended has nobody to tell."""
        with suppress(RuntimeError):  # the loop has been closed
            self.loop.call_soon_threadsafe(self._wake, requests)

    def _wake(self, requests: Sequence[OpenRequest]) -> None:
        for request in requests:
            find = self.streams.pop if request.ended() else self.streams.get
            stream = find(request.rid, None)
            if stream is not None:
                stream._news.set()


class AsyncEngine(_Base):
    """Serves requests as they come. `start` it within a running event loop."""

    def __init__(self, config: EngineConfig, *, in_process: bool = False) -> None:
        super().__init__(config, in_process=in_process)
        self._mailbox: _Mailbox | None = None

    async def start(self) -> None:
        """Returns when ready. Raises ModelError, InvalidField or EngineError where it cannot start."""
        try:
            await asyncio.to_thread(self._core.start)
        except BaseException:
            await asyncio.to_thread(self._core.close)
            raise

    async def restart_replica(self, number: int, *, drain: float = 3600.0) -> None:
        """Starts a replica anew, without losing a request; returns when it serves again.

        It gets nothing new, and what it computes is given `drain` seconds to end. After that others compute it once
        more, unless some of it has been told already: that fails with EngineDead. With one replica only, new requests
        are refused until it serves again. A replica that has failed is started, too.

        Raises InvalidField for a number that no replica has, EngineError where it is starting or restarting already, or
        what keeps it from starting.
        """
        await asyncio.to_thread(self._core.restart_replica, number, drain)

    async def close(self, *, drain: float = 0.0) -> None:
        """Waits up to `drain` seconds for open requests, ends the others with EngineClosed, then the processes."""
        await asyncio.to_thread(self._core.close, drain)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        stream: bool = True,
    ) -> RequestStream:
        """Submits one request. Raises InvalidField for what cannot be served, EngineDead while nothing is.

        A grammar is compiled beside the event loop, unless it is known; if it is then refused, reading the stream
        raises InvalidField. To know before: `check_grammar`.

        stream  True: a delta for each token, as it comes. False: one for each sample, when it has ended; this
                takes far less of the CPU
        """
        loop = asyncio.get_running_loop()
        if self._mailbox is None or self._mailbox.loop is not loop:
            self._mailbox = _Mailbox(loop)
        mailbox = self._mailbox
        request = self._core.submit(prompt, params or SamplingParams(), request_id, mailbox.tell, stream=stream)
        # What is told meanwhile waits: the loop runs this.
        found = mailbox.streams[request.rid] = RequestStream(self._core, request)
        return found

    async def embed(
        self,
        prompts: Sequence[Prompt],
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
        dimensions: int | None = None,
        priority: int = 0,
    ) -> list[EmbeddingOutput]:
        """The same as `Engine.embed`. Prompts are read in a thread. Cancelled, it aborts what is open."""
        # Thousands of long prompts take seconds to be checked.
        embedder = await asyncio.to_thread(Embedder, self._core, prompts, pooling, normalize, dimensions, priority)
        return await embedder.run_async()

    async def check_grammar(self, grammar: Grammar, *, most: int | None = None) -> None:
        """Waits until the grammar has been compiled, which is done once. Raises InvalidField("grammar") if it cannot be
        followed, EngineError where it cannot be told.

        most  raises EngineError, too, where it is unknown and so many others are being compiled
        """
        refuse(grammar, await asyncio.wrap_future(self._core.verdict(grammar, most)))

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
