"""EngineCore: open requests, and the life of the replica that serves them; `Engine` and `AsyncEngine` stand on it."""

from __future__ import annotations

import atexit
import itertools
import logging
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal, assert_never

import msgspec

from tok_core.assembly import OpenRequest, Sink
from tok_core.checks import check_request
from tok_core.config import EngineConfig
from tok_core.delivery import NO_ENDS, Delivery, sort_out
from tok_core.errors import EngineClosed, EngineDead, InvalidField, ModelError, TokError, from_wire
from tok_core.hub import resolve
from tok_core.ledger import Ledger
from tok_core.messages import Cancel, EngineInfo, Failed, Int32, Progress, Stats, Submit, ToEngine
from tok_core.processes.replica import ProcessReplica, Replica, ThreadReplica
from tok_core.sampling import SamplingParams
from tok_core.streamed import StreamedRequest
from tok_core.text.template import ChatTemplate
from tok_core.text.tokenizer import Tokenizer
from tok_core.whole import WholeRequest

log = logging.getLogger("tok_core")

EngineState = Literal["starting", "ready", "restarting", "failed", "closed"]

NOTHING_RUNS = dict.fromkeys(
    (
        *("requests_running", "requests_waiting", "sequences_running"),
        *("pages_used", "pages_cached", "steps_in_flight"),
    ),
    0,
)
"""Gauges of `Stats` once the replica is gone."""


class Health(msgspec.Struct, frozen=True):
    """Whether requests are served now, and if not, why."""

    ok: bool
    state: EngineState
    detail: str = ""


class EngineCore:
    """Thread-safe. Callbacks of requests run on the replica's reporting thread."""

    def __init__(self, config: EngineConfig, *, in_process: bool) -> None:
        self._name = config.model
        self._config = config
        self._kind = ThreadReplica if in_process else ProcessReplica
        self._replica: Replica | None = None
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._state: EngineState = "starting"
        self._detail = ""
        self._failure: TokError | None = None
        self._open: dict[int, OpenRequest] = {}
        self._by_id: dict[str, OpenRequest] = {}
        self._each_token: set[int] = set()  # open requests that are told of each token
        self._ledger = Ledger()
        self._numbers = itertools.count(1)
        self._seeds = random.Random()  # of the process: asking the system for each is slow while others compute
        self._deaths: deque[float] = deque()
        self._stats = Stats()
        self._begun = False
        self.restarts = 0
        self._info: EngineInfo | None = None
        self.tokenizer: Tokenizer | None = None
        self.chat_template: ChatTemplate | None = None

    @property
    def info(self) -> EngineInfo:
        """What the engine runs with; known once it is ready."""
        if self._info is None:
            raise EngineClosed("the engine has not been started")
        return self._info

    def start(self) -> None:
        """Blocks until ready. To be called once. Raises what kept the engine from starting."""
        with self._lock:
            if self._begun or self._state == "closed":
                raise EngineClosed("an engine starts once")
            self._begun = True
        # At the interpreter's exit a thread that still computes would abort the process.
        atexit.register(self.close)
        path = resolve(self._config.model, self._config.data_dir)
        self._config = msgspec.structs.replace(self._config, model=str(path))
        self.tokenizer, self.chat_template = _load_text(path)
        self._start_replica()
        with self._changed:
            self._changed.wait_for(lambda: self._state != "starting")
            if self._state != "ready":
                raise self._failure or (EngineClosed if self._closed() else EngineDead)(self._detail)

    def close(self, drain: float = 0.0) -> None:
        """Waits up to `drain` seconds for open requests, ends the others with EngineClosed, then the replica."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open or self._state != "ready", drain)
            if self._state == "closed":
                return
            atexit.unregister(self.close)
            self._set_state("closed", "the engine was closed")
            replica, self._replica = self._replica, None
        if replica is not None:
            replica.close()
        self._fail_open(lambda: EngineClosed("the engine was closed"))

    def submit(
        self, prompt: str | list[int], params: SamplingParams, request_id: str | None, sink: Sink, *, stream: bool
    ) -> OpenRequest:
        """A new request, told of token by token if `stream`, else of a sample at a time, when that has ended.

        Raises InvalidField for what cannot be served, EngineDead while nothing is.
        """
        self._require_ready()
        ids = self.encode(prompt)
        tokens = self.check(ids, params)
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=self._seeds.getrandbits(63))
        request_id = request_id or f"req-{secrets.token_hex(12)}"
        request = self._make_request(request_id, ids, params, sink, stream)
        try:
            self._open_request(request, Submit(request.rid, tokens, params))
        except BaseException:
            self._ledger.close(request.rid)
            raise
        return request

    def _make_request(
        self, request_id: str, ids: list[int], params: SamplingParams, sink: Sink, stream: bool
    ) -> OpenRequest:
        rid = next(self._numbers)
        if stream:
            return StreamedRequest(rid, request_id, ids, params, sink, self.tokenizer)
        return WholeRequest(rid, request_id, ids, params, sink, self.tokenizer, self._ledger)

    def _open_request(self, request: OpenRequest, message: Submit) -> None:
        with self._lock:
            self._require_ready()
            assert self._replica is not None
            if request.request_id in self._by_id:
                raise InvalidField("request_id", request.request_id, "an id that no open request has")
            self._open[request.rid] = self._by_id[request.request_id] = request
            if request.each_token:
                self._each_token.add(request.rid)
            try:
                self._replica.send(message)
            except BaseException:
                self._forget(request)
                raise

    def _require_ready(self) -> None:
        with self._lock:
            if self._state == "closed":
                raise EngineClosed("the engine was closed")
            if self._state != "ready":
                raise EngineDead(f"the engine is {self._state}" + (f": {self._detail}" if self._detail else ""))

    def encode(self, prompt: str | list[int]) -> list[int]:
        """Token ids of a prompt. Raises InvalidField for text where the model has no tokenizer."""
        if isinstance(prompt, list):
            return prompt
        if not isinstance(prompt, str):
            raise InvalidField("prompt", prompt, "text, or a list of token ids")
        if self.tokenizer is None:
            raise InvalidField("prompt", prompt, "token ids (the model has no tokenizer)")
        try:
            return self.tokenizer.encode(prompt)
        except InvalidField as error:
            raise InvalidField("prompt", prompt, error.allowed) from None

    def abort(self, request_id: str) -> None:
        """Ends a request; its samples finish with reason "abort". One that is not open is left alone."""
        with self._lock:
            request = self._by_id.get(request_id)
        if request is not None:
            self._abort(request)

    def abort_all(self, rids: Iterable[int]) -> None:
        """Aborts those of the requests that are still open."""
        with self._lock:
            requests = [self._open[rid] for rid in rids if rid in self._open]
        for request in requests:
            self._abort(request)

    def _abort(self, request: OpenRequest) -> None:
        with request.lock:
            if request.ended():
                return
            with self._lock:
                self._forget(request)
                if self._replica is not None:
                    self._replica.send(Cancel(request.rid))
            request.abort()
        _tell([request])

    def health(self) -> Health:
        """Whether requests are served now."""
        with self._lock:
            return Health(self._state == "ready", self._state, self._detail)

    def stats(self) -> dict[str, float]:
        """Counters since the replica's start, and gauges; see `Stats`. `restarts` counts replicas started anew."""
        return {**msgspec.structs.asdict(self._stats), "restarts": self.restarts}

    def check(self, ids: list[int], params: SamplingParams) -> Int32:
        """The prompt's token ids as an array. Raises InvalidField for a request that cannot be served."""
        return check_request(ids, params, self.info, has_tokenizer=self.tokenizer is not None)

    def _start_replica(self) -> None:
        with self._lock:  # `close` either comes first, and nothing is started, or finds what to close
            if self._state == "closed":
                return
            if self._state != "starting":
                self._failure = None
            self._replica = replica = self._kind(self._config, self._receive, self._on_death)
            replica.start()

    def _receive(self, message: ToEngine) -> None:
        match message:
            case Progress():
                self._deliver(message)
            case EngineInfo():
                with self._changed:
                    self._info = msgspec.structs.replace(message, model_id=_model_id(self._name))
                    if self._state != "closed":
                        self._set_state("ready", "")
            case Failed():
                self._failure = from_wire(message.kind, message.arguments)
            case _:
                assert_never(message)

    def _deliver(self, progress: Progress) -> None:
        """Hands out what one report brought: one call a sink. Texts are made outside the core's lock."""
        brought = sort_out(progress, self._ledger, self._each_token)
        with self._lock:
            self._stats = progress.stats
            for rid, cached in progress.cached:
                if rid in self._open:
                    self._open[rid].cached_tokens = cached
            begun = [self._open[rid] for rid in brought.begun if rid in self._open]
            changed = [self._open[rid] for rid in brought.rids() if rid in self._open]
        now = time.monotonic()
        for request in begun:
            request.begin(now)
        for request in changed:
            self._advance(request, brought, progress)
        _tell(changed)

    def _advance(self, request: OpenRequest, brought: Delivery, progress: Progress) -> None:
        with request.lock:  # an abort comes before or after
            if not request.ended():
                request.advance(brought.told, brought.ends.get(request.rid, NO_ENDS), progress)
                if request.ended():
                    self._forget(request)

    def _forget(self, request: OpenRequest) -> None:
        with self._changed:
            if self._open.pop(request.rid, None) is not None:
                del self._by_id[request.request_id]
                self._each_token.discard(request.rid)
                self._changed.notify_all()

    def _fail_open(self, error: Callable[[], TokError]) -> None:
        with self._lock:
            requests = list(self._open.values())
            for request in requests:
                self._forget(request)
        for request in requests:
            with request.lock:
                if not request.ended():
                    request.fail(error())
        _tell(requests)

    def _on_death(self, replica: Replica, reason: str) -> None:
        """Fails what is open, and starts the replica anew unless that has been done too often."""
        with self._lock:
            if self._state == "closed" or replica is not self._replica:
                return
            started = self._state != "starting"
            again = started and self._may_restart()
            detail = _why(reason, self._failure, started)
            self._replica = None
            self._set_state("restarting" if again else "failed", detail)
            self._stats = msgspec.structs.replace(self._stats, **NOTHING_RUNS)
        if started:
            log.error("the engine's replica ended: %s", reason)
        self._fail_open(lambda: EngineDead(f"the request was open when {detail}"))
        if again:
            self.restarts += 1
            try:
                self._start_replica()
            except Exception as error:
                log.exception("the engine's replica cannot be started anew")
                if not self._closed():
                    self._set_state("failed", f"{type(error).__name__}: {error}")

    def _may_restart(self) -> bool:
        now = time.monotonic()
        while self._deaths and now - self._deaths[0] > self._config.restart_window:
            self._deaths.popleft()
        self._deaths.append(now)
        return len(self._deaths) <= self._config.max_restarts

    def _closed(self) -> bool:
        return self._state == "closed"

    def _set_state(self, state: EngineState, detail: str) -> None:
        with self._changed:
            self._state, self._detail = state, detail
            self._changed.notify_all()


def _why(reason: str, failure: TokError | None, started: bool) -> str:
    """What to tell of a death: the process's own words where it had any."""
    if failure is None:
        return reason
    return f"{reason}: {failure}" if started else str(failure)


def _tell(requests: Sequence[OpenRequest]) -> None:
    """Calls each sink once; one that fails must not keep others from hearing."""
    news: dict[Sink, list[OpenRequest]] = {}
    for request in requests:
        news.setdefault(request.sink, []).append(request)
    for sink, about in news.items():
        try:
            sink(about)
        except Exception:
            log.exception("the callback of %d requests failed, %s one of them", len(about), about[0].request_id)


def _load_text(path: Path) -> tuple[Tokenizer | None, ChatTemplate | None]:
    """Tokenizer and chat template, each None where the directory has none that can be used."""
    try:
        tokenizer = Tokenizer.load(path)
    except ModelError as error:
        log.warning("token ids only, the tokenizer cannot be used: %s", error)
        return None, None
    try:
        return tokenizer, ChatTemplate.load(path)
    except ModelError as error:
        log.warning("no chat, the chat template cannot be used: %s", error)
        return tokenizer, None


def _model_id(model: str) -> str:
    """What the model is called: a hub id as it is, a directory by its last part."""
    path = Path(model)
    return path.resolve().name if path.is_dir() else model
