"""Engine and AsyncEngine: the engine to embed, blocking and asynchronous."""

from __future__ import annotations

import asyncio
import queue
import weakref
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from tok_core.config import EngineConfig
from tok_core.engine.checks import salt_of
from tok_core.engine.core import EngineCore
from tok_core.engine.embedder import Embedder
from tok_core.engine.progress_bar import ProgressBar, progress_bar
from tok_core.engine.request_stream import Mailbox, RequestStream
from tok_core.engine.requests import OpenRequest
from tok_core.errors import InvalidField
from tok_core.grammar import refuse
from tok_core.messages import EngineInfo
from tok_core.outputs import EmbeddingOutput, Pooling, RequestOutput
from tok_core.replicas import Health
from tok_core.sampling_params import Grammar, SamplingParams
from tok_core.text import ChatTemplate, Tokenizer

Prompt = str | list[int]
Params = SamplingParams | Sequence[SamplingParams]

SENT = 64  # prompts of a list that are submitted together


class _Base:
    """What both engines have in common."""

    def __init__(self, config: EngineConfig, *, in_process: bool = False) -> None:
        self._core = EngineCore(config, in_process=in_process)
        # Threads hold the core and never this object: an engine dropped without `close` ends its processes.
        weakref.finalize(self, self._core.close_soon).atexit = False  # at exit the core has a hook of its own

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
    """Generates for lists of prompts. Starts when constructed; a context manager. Closes when nothing refers to it.

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
        self,
        prompts: Sequence[Prompt],
        params: Params | None = None,
        *,
        progress: bool = False,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """One output a prompt, in the order of the prompts; `params` are one for all or one each.

        cache_salt  requests with different ones share nothing in the prefix cache

        Raises InvalidField before anything runs if any prompt cannot be served, EngineDead if a process dies.
        """
        outputs: list[RequestOutput | None] = [None] * len(prompts)
        for index, output in self._run(prompts, params, progress, cache_salt):
            outputs[index] = output
        return [output for output in outputs if output is not None]

    def stream(
        self,
        prompts: Sequence[Prompt],
        params: Params | None = None,
        *,
        progress: bool = False,
        cache_salt: str | None = None,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Index of the prompt and its output, in order of completion. `cache_salt`: as of `generate`."""
        return self._run(prompts, params, progress, cache_salt)

    def embed(
        self,
        prompts: Sequence[Prompt],
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
        dimensions: int | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> list[EmbeddingOutput]:
        """The embedding of each prompt, float32 `[N]`, in the order of the prompts.

        pooling     of the hidden states behind the model's final norm: the last token's, or the mean of all tokens'
        normalize   to length 1
        dimensions  only the first so many are wanted, at most the model's hidden size N; None: all
        priority    as of `SamplingParams`
        cache_salt  as of `generate`

        Raises InvalidField before anything runs if any prompt cannot be embedded, EngineDead if a process dies.
        """
        options = pooling, normalize, dimensions, priority, "", cache_salt
        return Embedder(self._core, prompts, *options).run()

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
        self, prompts: Sequence[Prompt], params: Params | None, progress: bool, cache_salt: str | None
    ) -> Iterator[tuple[int, RequestOutput]]:
        salt_of(cache_salt)  # refuses what is no salt before anything runs
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
                    later = i % SENT != SENT - 1 and i != len(ids) - 1
                    request = self._core.submit(
                        prompt, one, None, arrived.put, stream=False, later=later, cache_salt=cache_salt
                    )
                    index[request.rid] = i
                yield from self._collect(index, arrived, bar)
            finally:
                self._core.abort_all(index)

    def _collect(
        self, index: dict[int, int], arrived: queue.SimpleQueue[Sequence[OpenRequest]], bar: ProgressBar
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


class AsyncEngine(_Base):
    """Serves requests as they come. `start` it within a running event loop. Closes when nothing refers to it."""

    def __init__(self, config: EngineConfig, *, in_process: bool = False) -> None:
        super().__init__(config, in_process=in_process)
        self._mailbox: Mailbox | None = None

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
        tenant: str = "",
        cache_salt: str | None = None,
    ) -> RequestStream:
        """Submits one request. Raises InvalidField for what cannot be served, EngineDead while nothing is.

        A grammar is compiled beside the event loop, unless it is known; if it is then refused, reading the stream
        raises InvalidField. To know before: `check_grammar`.

        stream      True: a delta for each token, as it comes; tokens that come faster than they are read are read
                    together. False: one for each sample, when it has ended; this takes far less of the CPU
        tenant      an opaque name of the caller, such as a hash of its API key; "" if unknown. Callers of one class
                    (`priority`) get equal shares of the engine while they compete for it
        cache_salt  requests with different ones share nothing in the prefix cache
        """
        loop = asyncio.get_running_loop()
        if self._mailbox is None or self._mailbox.loop is not loop:
            self._mailbox = Mailbox(loop, self._core)
        return self._mailbox.submit(
            prompt, params or SamplingParams(), request_id, stream=stream, tenant=tenant, cache_salt=cache_salt
        )

    async def embed(
        self,
        prompts: Sequence[Prompt],
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
        dimensions: int | None = None,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str | None = None,
    ) -> list[EmbeddingOutput]:
        """The same as `Engine.embed`. Prompts are read in a thread. Cancelled, it aborts what is open.

        tenant, cache_salt  as of `generate`
        """
        options = pooling, normalize, dimensions, priority, tenant, cache_salt
        # Thousands of long prompts take seconds to be checked.
        embedder = await asyncio.to_thread(Embedder, self._core, prompts, *options)
        return await embedder.run_async()

    async def check_grammar(self, grammar: Grammar, *, most: int | None = None, tenant: str = "") -> None:
        """Waits until the grammar has been compiled, which is done once. Raises InvalidField("grammar") if it cannot be
        followed, EngineError where it cannot be told.

        most    raises EngineError, too, where it is unknown and so many others of the tenant are being compiled
        tenant  as of `generate`: several are served in turn
        """
        refuse(grammar, await asyncio.wrap_future(self._core.verdict(grammar, most, tenant)))

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
