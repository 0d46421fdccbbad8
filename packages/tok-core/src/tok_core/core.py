"""EngineCore: the open requests, and which replicas compute them; `Engine` and `AsyncEngine` stand on it."""

from __future__ import annotations

import atexit
import itertools
import logging
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from tok_core import parts
from tok_core.assembly import OpenRequest, Sink
from tok_core.checks import check_request
from tok_core.config import EngineConfig
from tok_core.delivery import NO_ENDS, Delivery, sort_out
from tok_core.errors import EngineClosed, EngineDead, InvalidField, ModelError, TokError
from tok_core.fleet import Fleet, Health
from tok_core.hub import resolve
from tok_core.ledger import Ledger
from tok_core.messages import Cancel, EngineInfo, Int32, Progress, array
from tok_core.parts import Part
from tok_core.routing import Asked, Router
from tok_core.sampling import SamplingParams
from tok_core.streamed import StreamedRequest
from tok_core.text.template import ChatTemplate
from tok_core.text.tokenizer import Tokenizer
from tok_core.whole import WholeRequest

log = logging.getLogger("tok_core")


class EngineCore:
    """Thread-safe. Callbacks of requests run on the replicas' reporting threads.

    Locks are taken in this order: a request's own, then the core's.
    """

    def __init__(self, config: EngineConfig, *, in_process: bool) -> None:
        self._config = config
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._fleet = Fleet(config, in_process=in_process, changed=self._changed, report=self._deliver, lost=self._lose)
        self._router = Router(config.dp, config.page_size)
        self._open: dict[int, OpenRequest] = {}
        self._by_id: dict[str, OpenRequest] = {}
        self._each_token: set[int] = set()  # open requests that are told of each token
        self._ledger = Ledger()
        self._numbers = itertools.count(1)
        self._seeds = random.Random()  # of the process: asking the system for each is slow while others compute
        self._begun = False
        self.tokenizer: Tokenizer | None = None
        self.chat_template: ChatTemplate | None = None

    @property
    def info(self) -> EngineInfo:
        """What the engine runs with; known once it is ready."""
        if self._fleet.info is None:
            raise EngineClosed("the engine has not been started")
        return self._fleet.info

    def start(self) -> None:
        """Blocks until ready. To be called once. Raises what kept the engine from starting."""
        with self._lock:
            if self._begun or self._fleet.closed:
                raise EngineClosed("an engine starts once")
            self._begun = True
        # At the interpreter's exit a thread that still computes would abort the process.
        atexit.register(self.close)
        path = resolve(self._config.model, self._config.data_dir)
        self.tokenizer, self.chat_template = _load_text(path)
        self._fleet.start(msgspec.structs.replace(self._config, model=str(path)), _model_id(self._config.model))
        self._fleet.await_start()

    def close(self, drain: float = 0.0) -> None:
        """Waits up to `drain` seconds for open requests, ends the others with EngineClosed, then the replicas."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open or self._fleet.state != "ready", drain)
            if self._fleet.closed:
                return
            atexit.unregister(self.close)
            replicas = self._fleet.shut()
        for replica in replicas:
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
            self._open_request(request, self._asked(request, tokens))
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

    def _asked(self, request: OpenRequest, tokens: Int32) -> Asked:
        return self._router.ask(request.rid, tokens, request.params, self.info.max_model_len - len(tokens))

    def _open_request(self, request: OpenRequest, asked: Asked) -> None:
        with self._lock:
            self._require_ready()
            if request.request_id in self._by_id:
                raise InvalidField("request_id", request.request_id, "an id that no open request has")
            self._open[request.rid] = self._by_id[request.request_id] = request
            if request.each_token:
                self._each_token.add(request.rid)
            try:
                shares = self._router.place(asked, range(request.params.n), self._fleet.ready(), split=True)
                request.parts = [Part(*share) for share in shares]
                for index in range(len(shares)):
                    self._send(request, index, asked.tokens)
            except BaseException:
                self._withdraw(request)
                raise

    def _send(self, request: OpenRequest, index: int, tokens: Int32) -> None:
        part = request.parts[index]
        self._fleet.send(part.replica, parts.submit(request.rid, index, part, tokens, request.params))

    def _require_ready(self) -> None:
        with self._lock:
            state, detail = self._fleet.state, self._fleet.detail
            if state == "closed":
                raise EngineClosed(detail)
            if state != "ready":
                raise EngineDead(f"the engine is {state}" + (f": {detail}" if detail else ""))

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
            self._withdraw(request)
            request.abort()
        _tell([request])

    def _withdraw(self, request: OpenRequest) -> None:
        """Forgets the request, and so shall the replicas."""
        with self._lock:
            self._forget(request)
            for index, part in enumerate(request.parts):
                self._fleet.send(part.replica, Cancel(parts.number(request.rid, index)))

    def health(self) -> Health:
        """Whether requests are served now, and by which replicas."""
        return self._fleet.health()

    def stats(self) -> dict[str, float]:
        """Counters since the start, and gauges, of all replicas together; see `Fleet.stats`."""
        return self._fleet.stats()

    def replica_stats(self) -> list[dict[str, float]]:
        """The same of each replica."""
        return self._fleet.replica_stats()

    def check(self, ids: list[int], params: SamplingParams) -> Int32:
        """The prompt's token ids as an array. Raises InvalidField for a request that cannot be served."""
        return check_request(ids, params, self.info, has_tokenizer=self.tokenizer is not None)

    def _deliver(self, replica: int, progress: Progress) -> None:
        """Hands out what one report brought: one call a sink. Texts are made outside the core's lock."""
        if self._router.several:
            progress = parts.of_requests(progress)
        brought = sort_out(progress, self._ledger, self._each_token)
        with self._lock:
            self._note_progress(replica, progress, brought)
            begun = [self._open[rid] for rid in brought.begun if rid in self._open]
            changed = [self._open[rid] for rid in brought.rids() if rid in self._open]
        now = time.monotonic()
        for request in begun:
            request.begin(now)
        for request in changed:
            self._advance(request, brought, progress)
        _tell(changed)

    def _note_progress(self, replica: int, progress: Progress, brought: Delivery) -> None:
        """What the open requests and the router are to know of a report."""
        for rid, cached in progress.cached:
            if rid in self._open:
                self._open[rid].cached_tokens = cached
        self._router.report(replica, *brought.counted)
        for rid, ends in brought.ends.items():
            if rid in self._open:
                self._router.end(replica, rid, self._open[rid].params, ends)

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
                for part in request.parts:
                    self._router.remove(part.replica, request.rid)
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

    def _lose(self, replica: int, reason: str) -> None:
        """Of what a replica computed when it died, others compute anew what nobody has been told of; the rest fails."""
        with self._lock:
            self._router.forget(replica)
            hit = [one for one in self._open.values() if any(part.replica == replica for part in one.parts)]
        which = f" (replica {replica})" if self._router.several else ""
        error = f"the request was open when {reason}{which}"
        failed = [request for request in hit if not self._rescue(request, replica, error)]
        _tell(failed)

    def _rescue(self, request: OpenRequest, replica: int, error: str) -> bool:
        """Whether the request goes on; if not, it has failed."""
        with request.lock:
            try:
                if request.ended() or self._replay(request, replica):
                    return True
            except Exception:
                log.exception("request %s cannot be computed anew", request.request_id)
            self._withdraw(request)
            request.fail(EngineDead(error))
            return False

    def _replay(self, request: OpenRequest, lost: int) -> bool:
        """Gives the request's parts of a dead replica to others, each part once."""
        with self._lock:
            ready = self._fleet.ready()
            parts = enumerate(request.parts)
            indices = [index for index, part in parts if part.replica == lost and request.runs(part.samples)]
            if not indices:
                return True  # what was computed there had ended
            if (
                not ready
                or len(request.prompt) >= self.info.max_model_len
                or any(request.parts[index].again for index in indices)
            ):
                return False
            if not all(request.restart(request.parts[index].samples) for index in indices):
                return False
            self._router.remove(lost, request.rid)
            asked = self._asked(request, array(request.prompt))
            for index in indices:
                (share,) = self._router.place(asked, request.parts[index].samples, ready, split=False)
                request.parts[index] = Part(*share, again=True)
                self._send(request, index, asked.tokens)
            return True


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
