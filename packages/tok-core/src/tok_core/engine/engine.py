"""Engine and AsyncEngine: the engine as a library, blocking and asynchronous."""

from __future__ import annotations

import asyncio
import queue
import weakref
from collections.abc import Iterator, Sequence
from typing import Self

from tok_core.config import EngineConfig
from tok_core.engine.checks import Params, params_per_prompt, salt_of
from tok_core.engine.control import PauseMode
from tok_core.engine.core import EngineCore
from tok_core.engine.embedding import Embedder
from tok_core.engine.open_requests import OpenRequest
from tok_core.engine.progress_bar import AdvanceBar, progress_bar
from tok_core.engine.request_stream import Mailbox, RequestStream
from tok_core.engine.weight_transfer import WeightTransfer
from tok_core.errors import InvalidField
from tok_core.grammar import refuse
from tok_core.messages import EngineInfo, MemoryTag
from tok_core.outputs import EmbeddingOutput, Pooling, RequestOutput
from tok_core.replicas import Health, MakeReplica
from tok_core.runtime import run_in_own_thread
from tok_core.sampling_params import Grammar, SamplingParams
from tok_core.text import ChatTemplate, Tokenizer

Prompt = str | list[int]
MemoryTags = Sequence[MemoryTag]
PROMPTS_PER_SEND = 64  # prompts of a list that are sent in one message


class _Base:
    """Common base of both engines."""

    def __init__(self, config: EngineConfig, *, in_process: bool = False) -> None:
        if not isinstance(config, EngineConfig):
            raise InvalidField("config", config, "an EngineConfig, such as EngineConfig(model=…)")
        self._core = EngineCore(config, in_process=in_process, make_replica=self._replica_maker())
        # Threads refer to the core but never to this object, so an engine dropped without `close` ends its processes.
        weakref.finalize(self, self._core.close_soon).atexit = False  # the core has its own hook at exit

    def _replica_maker(self) -> MakeReplica | None:
        """Return the constructor of replicas; None: as the configuration says. Engines that simulate override this."""
        return None

    @property
    def info(self) -> EngineInfo:
        """Return sizes of model and cache, and the value of every `auto`.

        With several replicas, `num_pages` and `max_running` are sums; `max_model_len` and `max_step_tokens` are minima.
        """
        return self._core.info

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Return the model's tokenizer; None if it has no usable one and only token ids can be served."""
        return self._core.tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        """Return the model's chat template, if it has one."""
        return self._core.chat_template

    @property
    def open_requests(self) -> int:
        """Return the number of requests that have not ended."""
        return self._core.open_requests

    @property
    def is_paused(self) -> bool:
        """Return whether the engine is paused; see `pause`."""
        return self._core.control.paused

    @property
    def is_sleeping(self) -> bool:
        """Return whether any memory is released; see `sleep`."""
        return bool(self._core.control.asleep)

    @property
    def weight_version(self) -> str:
        """Return the version of the weights in use: "default" until they are updated."""
        return self._core.control.version

    @property
    def weight_transfer(self) -> WeightTransfer:
        """Return the `WeightTransfer`, which updates the weights by a trainer's tensors; its methods block."""
        return self._core.control.transfer

    def health(self) -> Health:
        """Return whether any replica serves requests now, and the state of each."""
        return self._core.health()

    def stats(self) -> dict[str, float]:
        """Return counters since the start, and gauges, summed over all replicas; see `tok_core.messages.Stats`.

        `restarts`: of replicas; `replicas`, `replicas_ready`: all, and the ready ones. A request counts once in each
        replica that has samples of it.
        """
        return self._core.stats()

    def replica_stats(self) -> list[dict[str, float]]:
        """Return the same for each replica, in order of their numbers; `ready` is 1 if it serves, else 0."""
        return self._core.replica_stats()


class Engine(_Base):
    """Blocking engine for lists of prompts; a context manager.

    The constructor starts the engine, and raises ModelError, InvalidField or EngineError if it cannot start. The engine
    closes when nothing refers to it.

    config      see `EngineConfig`
    in_process  run manager and worker in a thread of this process instead of in child processes
    """

    def __init__(self, config: EngineConfig, *, in_process: bool = False) -> None:
        super().__init__(config, in_process=in_process)
        self._core.claim_start()
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
        """Return one output per prompt, in the order of the prompts.

        params      one for all prompts, or a list with one for each
        cache_salt  requests with different salts share no pages of the prefix cache

        Raises InvalidField before anything runs if any prompt cannot be served, EngineDead if a process dies.
        """
        outputs = dict(self._run(prompts, params, progress, cache_salt))
        return [outputs[index] for index in range(len(outputs))]

    def stream(
        self,
        prompts: Sequence[Prompt],
        params: Params | None = None,
        *,
        progress: bool = False,
        cache_salt: str | None = None,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Yield the index of each prompt and its output, in order of completion. `cache_salt`: as for `generate`."""
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
        """Return the embedding of each prompt, float32 `[N]`, in the order of the prompts.

        pooling     of the hidden states after the model's final norm: the last token's, or the mean of all tokens'
        normalize   scale to length 1
        dimensions  number of leading dimensions to return, at most the model's hidden size; None: all
        priority    as for `SamplingParams`
        cache_salt  as for `generate`

        Raises InvalidField before anything runs if any prompt cannot be embedded, EngineDead if a process dies.
        """
        options = pooling, normalize, dimensions, priority, "", cache_salt
        return Embedder(self._core, prompts, *options).run()

    def pause(self, mode: PauseMode = "keep") -> None:
        """Pause all replicas; return once no step is in flight. Requests that arrive wait until `resume`.

        mode  of open requests. "keep": they stop and keep their KV cache; "retract": they stop and compute it again at
              `resume`. "wait": they end first. "abort": they finish with reason "abort" and the tokens so far

        While "wait" waits, `resume` ends it with EngineResumed, and a pause or sleep of another mode takes its place.
        """
        self._core.control.pause(mode)

    def resume(self) -> None:
        """Let all replicas compute again; without effect if not paused."""
        self._core.control.resume()

    def update_weights(self, directory: str, *, version: str | None = None) -> str:
        """Load the weights in `directory` into the running model, in all replicas or none; return their version.

        directory  safetensors files in the format of the engine's checkpoint. A replica that restarts loads it again
        version    name of the weights in outputs; None: "1" for the first update, then "2", …

        The engine is paused in mode "keep" meanwhile, unless it is paused already. Prefixes cached before are not used
        again. Running samples keep the KV cache of the old weights; all others compute their tokens with the new ones.
        All workers check the files first. ModelError names a tensor that does not fit; then nothing has changed.
        """
        return self._core.control.update_weights(directory, version)

    def sleep(self, level: int = 1, *, mode: PauseMode = "keep", tags: MemoryTags | None = None) -> None:
        """Give the memory of weights and KV cache back to the system, in all replicas or none, until `wake_up`.

        level  1: weights are copied to the host's memory (on a CPU they stay where they are). 2: they are dropped, and
               come back by `update_weights`; without an update, the last `wake_up` reads their directory again
        mode   of open requests, as for `pause`: those kept are computed again after the sleep. Later requests wait
        tags   "weights", "kv_cache"; None: both. The engine computes nothing while either is released

        Raises InvalidField without `enable_sleep_mode`, EngineError if there is no host memory for the copy.
        """
        self._core.control.sleep(level, mode, tags)

    def wake_up(self, tags: MemoryTags | None = None) -> None:
        """Take the memory of `tags` again (None: all), at the same addresses, in all replicas or none.

        Raises EngineError (no memory is free) or ModelError (dropped weights cannot be read); the engine sleeps on.
        """
        self._core.control.wake_up(tags)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Samples that run keep theirs."""
        self._core.control.clear_cache()

    def close(self) -> None:
        """End the engine; open requests fail with EngineClosed."""
        self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self, prompts: Sequence[Prompt], params: Params | None, progress: bool, cache_salt: str | None
    ) -> Iterator[tuple[int, RequestOutput]]:
        salt_of(cache_salt)  # raises for an invalid salt before anything runs
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise InvalidField("prompts", prompts, "a list of prompts")
        all_params = params_per_prompt(params, len(prompts))
        ids = [self._encode(prompts[index], sampling, index) for index, sampling in enumerate(all_params)]
        for grammar in {sampling.grammar for sampling in all_params if sampling.grammar is not None}:
            refuse(grammar, self._core.verdict(grammar).result())
        arrived: queue.SimpleQueue[Sequence[OpenRequest]] = queue.SimpleQueue()
        with progress_bar(progress, sum(sampling.n for sampling in all_params)) as advance_bar:
            index: dict[int, int] = {}
            try:
                for i, (prompt, sampling) in enumerate(zip(ids, all_params, strict=True)):
                    later = i % PROMPTS_PER_SEND != PROMPTS_PER_SEND - 1 and i != len(ids) - 1
                    request = self._core.submit(
                        prompt, sampling, None, arrived.put, stream=False, later=later, cache_salt=cache_salt
                    )
                    index[request.rid] = i
                yield from self._collect(index, arrived, advance_bar)
            finally:
                self._core.abort_all(index)

    def _encode(self, prompt: Prompt, params: SamplingParams, index: int) -> list[int]:
        """Return the token ids of prompt number `index`. Raise InvalidField if it cannot be served."""
        try:
            ids = self._core.encode(prompt, params)
            self._core.check(ids, params)
        except InvalidField as error:
            raise (error.renamed(f"prompts[{index}]") if error.field == "prompt" else error) from None
        return ids

    def _collect(
        self,
        index: dict[int, int],
        arrived: queue.SimpleQueue[Sequence[OpenRequest]],
        advance_bar: AdvanceBar,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Yield each request when it is done, and remove it from `index`."""
        while index:
            for request in arrived.get():
                ended = request.ended()  # read before `take`, which then returns everything left
                advance_bar(request.take())
                if request.error is not None:
                    raise request.error
                if ended and request.rid in index:
                    yield index.pop(request.rid), request.output()


class AsyncEngine(_Base):
    """Engine for requests from an asyncio event loop. Call `start` first; closes when nothing refers to it."""

    def __init__(self, config: EngineConfig, *, in_process: bool = False) -> None:
        super().__init__(config, in_process=in_process)
        self._mailbox: Mailbox | None = None

    async def start(self) -> None:
        """Start the engine, once; return when it is ready. Raise ModelError, InvalidField or EngineError if it cannot.

        A second call raises EngineClosed, without effect on the engine.
        """
        self._core.claim_start()
        try:
            await asyncio.to_thread(self._core.start)
        except BaseException:
            await run_in_own_thread(self._core.close)
            raise

    async def restart_replica(self, number: int, *, drain: float = 3600.0) -> None:
        """Restart a replica after draining it; return when it serves again. A failed replica is started, too.

        The replica gets no new requests, and its open requests get `drain` seconds to end. After that, other replicas
        compute the remaining samples again. Requests whose owners have already received part of these samples fail with
        EngineDead. With a single replica, new requests are refused until it serves again.

        Raises InvalidField for a number that no replica has, EngineError if it is already starting or restarting, and
        the error that keeps it from starting.
        """
        await run_in_own_thread(self._core.restart_replica, number, drain)

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Pause all replicas; see `Engine.pause`."""
        await run_in_own_thread(self._core.control.pause, mode)

    async def resume(self) -> None:
        """Let all replicas compute again; see `Engine.resume`."""
        await run_in_own_thread(self._core.control.resume)

    async def update_weights(self, directory: str, *, version: str | None = None) -> str:
        """Load the weights in `directory` into the running model; see `Engine.update_weights`."""
        return await run_in_own_thread(self._core.control.update_weights, directory, version)

    async def sleep(self, level: int = 1, *, mode: PauseMode = "keep", tags: MemoryTags | None = None) -> None:
        """Give the memory of weights and KV cache back to the system; see `Engine.sleep`."""
        await run_in_own_thread(self._core.control.sleep, level, mode, tags)

    async def wake_up(self, tags: MemoryTags | None = None) -> None:
        """Take released memory again; see `Engine.wake_up`."""
        await run_in_own_thread(self._core.control.wake_up, tags)

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; see `Engine.reset_prefix_cache`."""
        await run_in_own_thread(self._core.control.clear_cache)

    async def close(self, *, drain: float = 0.0) -> None:
        """Wait up to `drain` seconds for open requests, fail the others with EngineClosed, then end the processes."""
        await run_in_own_thread(self._core.close, drain)

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
        """Submit one request. Raise InvalidField if it cannot be served, EngineDead while no replica serves.

        An unknown grammar is compiled outside of the event loop; if it is refused, reading the stream raises
        InvalidField. Call `check_grammar` to find out before.

        stream      True: a delta for each token; tokens that arrive faster than they are read share a delta. False: one
                    delta for each sample when it has ended, which takes far less CPU time
        tenant      an opaque name of the caller, such as a hash of its API key; "" if unknown. Callers of one class
                    (`priority`) get equal shares of the engine while they compete for it
        cache_salt  requests with different salts share no pages of the prefix cache
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
        """Return the same as `Engine.embed`. Prompts are checked in a thread. Cancellation aborts the open requests.

        tenant, cache_salt  as for `generate`
        """
        options = pooling, normalize, dimensions, priority, tenant, cache_salt
        # Checking thousands of long prompts takes seconds.
        embedder = await asyncio.to_thread(Embedder, self._core, prompts, *options)
        return await embedder.run_async()

    async def check_grammar(self, grammar: Grammar, *, most: int | None = None, tenant: str = "") -> None:
        """Wait until the grammar has been compiled, which is done once per grammar.

        Raises InvalidField("grammar") if the grammar cannot be served, and EngineError if the check itself fails.

        most    raise EngineError, too, if the grammar is unknown and this many others of the tenant are being compiled
        tenant  as for `generate`; tenants are served in turn
        """
        refuse(grammar, await asyncio.wrap_future(self._core.verdict(grammar, most, tenant)))

    async def abort(self, request_id: str) -> None:
        """Abort a request; its samples finish with reason "abort"."""
        self._core.abort(request_id)

    async def abort_prefix(self, prefix: str) -> None:
        """Abort all open requests whose ids begin with `prefix`."""
        self._core.abort_prefix(prefix)

    async def abort_all(self) -> None:
        """Abort all open requests; their samples finish with reason "abort"."""
        self._core.abort_open()
