"""EngineCore: start, close, and submit requests; the common base of `Engine` and `AsyncEngine`."""

from __future__ import annotations

import _thread
import atexit
import itertools
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tok_core.config import EngineConfig
from tok_core.engine.checks import banned_sequences, check_request, check_tenant, salt_of
from tok_core.engine.control import EngineControl
from tok_core.engine.dispatcher import Dispatcher
from tok_core.engine.embedding import EmbedRequest
from tok_core.engine.generation_requests import StreamedRequest, UnstreamedRequest
from tok_core.engine.open_requests import OpenRequest, OpenRequests, Sink, notify, reported_error
from tok_core.engine.output_router import OutputRouter
from tok_core.engine.token_store import TokenStore
from tok_core.errors import EngineClosed, InvalidField, TokError
from tok_core.grammar import Checker, GrammarLimits, LocalExaminer, process_checker, refuse
from tok_core.messages import CommandResult, EngineInfo, Int32, Progress
from tok_core.model_config import resolve, resolve_draft, resolve_tokenizer
from tok_core.outputs import Ending, Pooling
from tok_core.replicas import Health, MakeReplica, Replica, ReplicaSet, Router, RoutingRequest
from tok_core.sampling_params import Grammar, SamplingParams, seeded
from tok_core.text import ChatTemplate, Tokenizer, load_text

log = logging.getLogger("tok_core")

DRAIN_POLL_SECONDS = 0.1  # seconds between checks whether a draining replica still computes
_FORKED = "the engine belongs to process {}, and a process forked from that cannot use it; start another one here"


@dataclass(frozen=True, slots=True)
class _ReplicaEvents:
    """`ReplicaEvents` that passes each event to dispatcher, output router and control."""

    dispatcher: Dispatcher
    output_router: OutputRouter
    control: EngineControl

    def reported(self, replica: int, progress: Progress) -> None:
        self.output_router.deliver(replica, progress)

    def answered(self, replica: int, result: CommandResult) -> None:
        self.control.receive_answer(replica, result)

    def lost(self, replica: int, reason: str) -> None:
        self.dispatcher.replica_lost(replica, reason)
        self.control.replica_lost(replica, reason)

    def settled(self) -> None:
        self.dispatcher.dispatch_held()


class EngineCore:
    """Thread-safe engine without a blocking or asynchronous interface. Sinks run mostly on replicas' reporting threads.

    Lock order: a request's own lock, then the core's. A forked process has none of the core's threads, and finds its
    locks in any state: there every call raises EngineClosed or returns at once.
    """

    def __init__(self, config: EngineConfig, *, in_process: bool, make_replica: MakeReplica | None) -> None:
        self._config = config
        self._in_process = in_process
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._open = OpenRequests(self._changed)
        self._router = Router(config.dp, config.page_size)
        self._token_store = TokenStore()
        self._replica_set = ReplicaSet(config, in_process=in_process, changed=self._changed, make_replica=make_replica)
        self._dispatcher = Dispatcher(self._replica_set, self._router, self._open, self._lock)
        self._output_router = OutputRouter(self._open, self._dispatcher, self._router, self._token_store, self._lock)
        self._control = EngineControl(
            self._replica_set,
            self._dispatcher,
            self._open,
            self._changed,
            self.abort_all,
            sleep_mode=config.enable_sleep_mode,
        )
        self._events = _ReplicaEvents(self._dispatcher, self._output_router, self._control)
        self._numbers = itertools.count(1)
        self._random = random.Random()  # seeded once: asking the system for each number is slow under load
        self._begun = False
        self._process = os.getpid()
        self._closer: int | None = None  # identifier of the thread that closes the core
        self._closed = threading.Event()
        self._checker: Checker | None = None
        self.chat_template: ChatTemplate | None = None

    @property
    def info(self) -> EngineInfo:
        """Return the engine's properties. Raise EngineClosed before the engine is ready."""
        return self._dispatcher.info

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Return the model's tokenizer, if it has a usable one."""
        return self._output_router.tokenizer

    @property
    def control(self) -> EngineControl:
        """Return the control, which pauses the engine and changes its weights."""
        self._require_own_process()
        return self._control

    def claim_start(self) -> None:
        """Claim the only start of this core. Raise EngineClosed, without effect, if it has been claimed or closed."""
        self._require_own_process()
        with self._lock:
            if self._begun or self._replica_set.closed:
                raise EngineClosed("an engine starts once")
            self._begun = True

    def start(self) -> None:
        """Start the replicas and block until they are ready, after `claim_start`. Raise the error of a failed start."""
        # A thread that still computes at the interpreter's exit would abort the process.
        atexit.register(self.close)
        config = self._config
        model_path = tokenizer_path = resolve(config.model, config.data_dir, config.revision)
        paths = {"model": str(model_path)}
        if config.tokenizer is not None:
            tokenizer_path = resolve_tokenizer(config.tokenizer, config.data_dir)
            if config.ray is None:  # else each host resolves it
                paths["tokenizer"] = str(tokenizer_path)
        if config.draft is not None and config.ray is None:
            paths["draft"] = str(resolve_draft(config.draft, config.data_dir))
        self._output_router.tokenizer, self.chat_template = load_text(tokenizer_path, config.chat_template)
        self._replica_set.start(
            msgspec.structs.replace(config, **paths),
            _model_id(self._config.model),
            self._events,
        )
        self._replica_set.await_start()
        limits = GrammarLimits(str(tokenizer_path), self.info.vocab_size, self.info.eos_token_ids)
        self._checker = Checker(LocalExaminer(limits)) if self._in_process else process_checker(limits)

    def close(self, drain: float = 0.0) -> None:
        """Wait up to `drain` seconds for open requests, end the others with EngineClosed, then end the replicas.

        A second call returns when the first one is done.
        """
        if not self._in_own_process():
            return
        with self._changed:
            self._changed.wait_for(lambda: not len(self._open) or not self._replica_set.computes, drain)
            first, replicas = not self._replica_set.closed, self._replica_set.shut()
            if first:
                self._closer = threading.get_ident()
        if first:
            try:
                self._end(replicas)
            finally:
                self._closed.set()
                atexit.unregister(self.close)  # last, so that an interpreter that exits meanwhile waits for the end
        elif self._closer != threading.get_ident():
            self._closed.wait()

    def close_soon(self) -> None:
        """Close in a new thread. For a finalizer, which may run while its thread holds any lock."""
        if self._in_own_process() and not self._replica_set.closed:
            _thread.start_new_thread(self.close, ())  # not `Thread.start`, which takes locks

    def _end(self, replicas: list[Replica]) -> None:
        for replica in replicas:
            replica.close()
        self._fail_open(lambda: EngineClosed("the engine was closed"))
        if self._checker is not None:
            self._checker.close()

    def _in_own_process(self) -> bool:
        return os.getpid() == self._process

    def _require_own_process(self) -> None:
        """Raise EngineClosed in a forked process."""
        if not self._in_own_process():
            raise EngineClosed(_FORKED.format(self._process))

    def submit(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        request_id: str | None,
        sink: Sink,
        *,
        stream: bool,
        later: bool = False,
        tenant: str = "",
        cache_salt: str | None = None,
    ) -> OpenRequest:
        """Open a new request. Its sink is notified of each token if `stream`, else of each sample when it has ended.

        prompt  text, or token ids; the list becomes the request's own, and must not be changed
        later   send the request together with the next one that has `later` unset, or at the next `flush`

        Raises InvalidField for a request that cannot be served, and EngineDead while no replica serves. An unchecked
        grammar is checked after the request is opened: if it is refused, the request ends with InvalidField.
        """
        self._require_own_process()
        self._dispatcher.require_ready()
        if not isinstance(params, SamplingParams):
            raise InvalidField("params", params, "SamplingParams")
        if request_id is not None and type(request_id) is not str:  # `abort_prefix` compares all ids
            raise InvalidField("request_id", request_id, "a string, or None for a new one")
        check_tenant(tenant)
        salt = salt_of(cache_salt)
        if params.logit_bias is not None:
            params = msgspec.structs.replace(params)  # checks and copies the dict, which may have changed
        ids = self._encode(prompt, params)
        tokens = self.check(ids, params)
        banned = banned_sequences(params, self.tokenizer, self.info)
        verdict = None if params.grammar is None else self.verdict(params.grammar, tenant=tenant)
        if verdict is not None and params.grammar is not None and verdict.done():
            refuse(params.grammar, verdict.result())
            verdict = None
        if params.seed is None:
            params = seeded(params, self._random.getrandbits(63))
        request = self._make_request(request_id or self._new_id(), ids, params, sink, stream)
        request.tenant, request.salt, request.banned = tenant, salt, banned
        try:
            routing = self._dispatcher.routing_request(request, tokens)
            self._dispatcher.open(request, None if verdict is not None else routing, later=later)
        except BaseException:
            self._token_store.close(request.rid)
            raise
        if verdict is not None:
            verdict.add_done_callback(lambda done: self._dispatch_checked(request, routing, done))
        return request

    def verdict(self, grammar: Grammar, most: int | None = None, tenant: str = "") -> Future[str]:
        """Start a check of the grammar. Its result is "", or the allowed values; see `Checker.begin`."""
        self._require_own_process()
        if self._checker is None:
            raise EngineClosed("the engine has not been started")
        return self._checker.begin(grammar, most, tenant)

    def _dispatch_checked(self, request: OpenRequest, routing: RoutingRequest, verdict: Future[str]) -> None:
        """Dispatch an open request whose grammar has been checked, or fail it."""
        with request.lock:
            if request.ended():
                return
            try:
                assert request.params.grammar is not None
                refuse(request.params.grammar, verdict.result())
                self._dispatcher.dispatch_or_hold(request, routing)
                return
            except Exception as error:  # any error must end the request, or it would stay open
                self._dispatcher.withdraw(request)
                request.fail(reported_error(error))
        notify([request])

    def embed(
        self,
        ids: list[int],
        params: SamplingParams,
        pooling: Pooling,
        sink: Sink,
        tokens: Int32,
        tenant: str = "",
        salt: bytes = b"",
    ) -> EmbedRequest:
        """Open a new request for the embedding of a prompt. Raises as `submit` does.

        params  with `max_tokens` 0
        tokens  the prompt as returned by `check`
        salt    as returned by `salt_of`
        """
        self._require_own_process()
        self._dispatcher.require_ready()
        request = EmbedRequest(next(self._numbers), self._new_id(), ids, params, pooling, sink)
        request.tenant, request.salt = tenant, salt
        self._dispatcher.open(request, self._dispatcher.routing_request(request, tokens))
        return request

    def _make_request(
        self, request_id: str, ids: list[int], params: SamplingParams, sink: Sink, stream: bool
    ) -> OpenRequest:
        rid = next(self._numbers)
        if stream:
            return StreamedRequest(rid, request_id, ids, params, sink, self.tokenizer)
        return UnstreamedRequest(rid, request_id, ids, params, sink, self.tokenizer, self._token_store)

    def _new_id(self) -> str:
        return f"req-{self._random.getrandbits(96):024x}"

    def flush(self) -> None:
        """Send the requests submitted with `later`."""
        if self._in_own_process():
            self._replica_set.flush()

    def encode(self, prompt: str | list[int], params: SamplingParams | None = None) -> list[int]:
        """Return the token ids of a prompt, truncated as `params` requests, in a list that no one else has.

        Raise InvalidField for text if the model has no tokenizer.
        """
        return self._encode(list(prompt) if isinstance(prompt, list) else prompt, params)

    def _encode(self, prompt: str | list[int], params: SamplingParams | None) -> list[int]:
        ids = prompt if isinstance(prompt, list) else self._tokenize(prompt)
        if params is None or params.truncate_prompt_tokens is None:
            return ids
        begin = 0 if isinstance(prompt, list) or self.tokenizer is None else self.tokenizer.begin_count
        return params.truncate(ids, self.info.max_model_len, begin)

    def _tokenize(self, prompt: str) -> list[int]:
        if not isinstance(prompt, str):
            raise InvalidField("prompt", prompt, "text, or a list of token ids")
        if self.tokenizer is None:
            raise InvalidField("prompt", prompt, "token ids (the model has no tokenizer)")
        try:
            return self.tokenizer.encode(prompt)
        except InvalidField as error:
            raise InvalidField("prompt", prompt, error.allowed) from None

    def abort(self, request_id: str) -> None:
        """Abort a request: its samples finish with reason "abort". Ignored if no open request has this id."""
        request = self._open.named(request_id) if self._in_own_process() else None
        if request is not None:
            self._abort(request)

    def abort_prefix(self, prefix: str) -> None:
        """Abort all open requests whose ids begin with `prefix`."""
        for request in self._open.with_prefix(prefix) if self._in_own_process() else ():
            self._abort(request)

    def abort_all(self, rids: Iterable[int], reason: Ending = "abort") -> None:
        """Abort the requests that are still open; their samples finish with `reason`."""
        for request in self._open.some(rids) if self._in_own_process() else ():
            self._abort(request, reason)

    def abort_open(self) -> None:
        """Abort all open requests."""
        if self._in_own_process():
            self.abort_all([request.rid for request in self._open.all()])

    def _abort(self, request: OpenRequest, reason: Ending = "abort") -> None:
        with request.lock:
            self._dispatcher.withdraw(request)
            if not request.ended():
                try:
                    request.abort(reason)
                except Exception as error:
                    log.exception("request %s cannot be aborted", request.request_id)
                    request.fail(reported_error(error))
        notify([request])

    @property
    def open_requests(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self._open)

    def restart_replica(self, number: int, drain: float) -> None:
        """Restart a replica and block until it serves again; see `AsyncEngine.restart_replica`."""
        self._require_own_process()
        if type(number) is not int or not 0 <= number < self._config.dp:
            raise InvalidField("replica", number, f"integers from 0 to {self._config.dp - 1}")
        if not isinstance(drain, int | float) or not drain >= 0:
            raise InvalidField("drain", drain, "seconds from 0")
        replica = self._replica_set.drain(number)
        deadline = time.monotonic() + drain
        while time.monotonic() < deadline and not self._replica_set.closed and self._dispatcher.computes(number):
            time.sleep(DRAIN_POLL_SECONDS)  # polls: with many open requests a condition would wake all the time
        self._replica_set.renew(number, replica)

    def health(self) -> Health:
        """Return whether requests are served now, and by which replicas."""
        if not self._in_own_process():
            return Health(False, "closed", _FORKED.format(self._process))
        return self._replica_set.health()

    def stats(self) -> dict[str, float]:
        """Return counters since the start, and gauges, summed over all replicas; see `ReplicaSet.stats`."""
        self._require_own_process()
        return self._replica_set.stats()

    def replica_stats(self) -> list[dict[str, float]]:
        """Return the same for each replica."""
        self._require_own_process()
        return self._replica_set.replica_stats()

    def check(self, ids: list[int], params: SamplingParams) -> Int32:
        """Return the prompt's token ids as an array. Raise InvalidField for a request that cannot be served."""
        tokens = check_request(ids, params, self.info, has_tokenizer=self.tokenizer is not None)
        banned_sequences(params, self.tokenizer, self.info)
        return tokens

    def _fail_open(self, error: Callable[[], TokError]) -> None:
        with self._lock:
            requests = self._open.all()
            self._dispatcher.remove(requests)
        for request in requests:
            with request.lock:
                if not request.ended():
                    request.fail(error())
        notify(requests)


def _model_id(model: str) -> str:
    """Return the model's name: a hub id unchanged, or the last part of a directory's path."""
    path = Path(model)
    return path.resolve().name if path.is_dir() else model
