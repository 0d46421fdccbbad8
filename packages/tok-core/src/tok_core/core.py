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
from concurrent.futures import CancelledError, Future
from pathlib import Path

import msgspec

from tok_core import parts
from tok_core.assembly import OpenRequest, Sink
from tok_core.checks import check_request, least_room
from tok_core.config import EngineConfig
from tok_core.delivery import NO_ENDS, Delivery, sort_out
from tok_core.embedding import EmbedRequest
from tok_core.errors import EngineClosed, EngineDead, EngineError, InvalidField, ModelError, TokError
from tok_core.fleet import Fleet, Health
from tok_core.grammar import Grammar
from tok_core.grammar.checker import Checker, LocalExaminer, Task, refuse
from tok_core.grammar.examiner import ProcessExaminer
from tok_core.hub import resolve
from tok_core.ledger import Ledger
from tok_core.messages import Cancel, EngineInfo, Int32, Progress, array
from tok_core.outputs import Ending, Pooling
from tok_core.parts import Part
from tok_core.routing import Asked, Router
from tok_core.sampling import SamplingParams
from tok_core.streamed import StreamedRequest
from tok_core.text.template import ChatTemplate
from tok_core.text.tokenizer import Tokenizer
from tok_core.whole import WholeRequest

log = logging.getLogger("tok_core")

DRAIN_LOOK = 0.1  # seconds between looks at what a replica still computes


class EngineCore:
    """Thread-safe. Callbacks of requests run on the replicas' reporting threads.

    Locks are taken in this order: a request's own, then the core's.
    """

    def __init__(self, config: EngineConfig, *, in_process: bool) -> None:
        self._config = config
        self._in_process = in_process
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._fleet = Fleet(
            config,
            in_process=in_process,
            changed=self._changed,
            report=self._deliver,
            lost=self._lose,
            settled=self._place_held,
        )
        self._router = Router(config.dp, config.page_size)
        self._open: dict[int, OpenRequest] = {}
        self._by_id: dict[str, OpenRequest] = {}
        self._held: list[tuple[OpenRequest, Asked]] = []  # open requests that wait for a replica to be back
        self._each_token: set[int] = set()  # open requests that are told of each token
        self._ledger = Ledger()
        self._numbers = itertools.count(1)
        self._seeds = random.Random()  # of the process: asking the system for each is slow while others compute
        self._begun = False
        self._checker: Checker | None = None
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
        task = Task(str(path), self.info.vocab_size, self.info.eos_token_ids)
        # Two of them: a grammar that takes its whole time does not keep all others waiting.
        self._checker = Checker(LocalExaminer(task)) if self._in_process else Checker(*map(ProcessExaminer, [task] * 2))

    def close(self, drain: float = 0.0) -> None:
        """Waits up to `drain` seconds for open requests, ends the others with EngineClosed, then the replicas."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open or not self._fleet.computes, drain)
            if self._fleet.closed:
                return
            atexit.unregister(self.close)
            replicas = self._fleet.shut()
        for replica in replicas:
            replica.close()
        self._fail_open(lambda: EngineClosed("the engine was closed"))
        if self._checker is not None:
            self._checker.close()

    def submit(
        self, prompt: str | list[int], params: SamplingParams, request_id: str | None, sink: Sink, *, stream: bool
    ) -> OpenRequest:
        """A new request, told of token by token if `stream`, else of a sample at a time, when that has ended.

        Raises InvalidField for what cannot be served, EngineDead while nothing is. A grammar that has not been checked
        yet is while the request is open: if it is refused, the request ends with InvalidField.
        """
        self._require_ready()
        ids = self.encode(prompt)
        tokens = self.check(ids, params)
        verdict = None if params.grammar is None else self.verdict(params.grammar)
        if verdict is not None and params.grammar is not None and verdict.done():
            refuse(params.grammar, verdict.result())
            verdict = None
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=self._seeds.getrandbits(63))
        request = self._make_request(request_id or _new_id(), ids, params, sink, stream)
        try:
            asked = self._asked(request, tokens)
            self._open_request(request, None if verdict is not None else asked)
        except BaseException:
            self._ledger.close(request.rid)
            raise
        if verdict is not None:
            verdict.add_done_callback(lambda done: self._place_checked(request, asked, done))
        return request

    def verdict(self, grammar: Grammar, most: int | None = None) -> Future[str]:
        """What is allowed in place of the grammar, "" if it is itself; see `Checker.begin`."""
        if self._checker is None:
            raise EngineClosed("the engine has not been started")
        return self._checker.begin(grammar, most)

    def _place_checked(self, request: OpenRequest, asked: Asked, verdict: Future[str]) -> None:
        """The grammar of an open request has been checked."""
        with request.lock:
            if request.ended():
                return
            try:
                assert request.params.grammar is not None
                refuse(request.params.grammar, verdict.result())
                self._place_or_hold(request, asked)
                return
            except Exception as error:  # of whatever kind: nobody else would end it
                self._withdraw(request)
                request.fail(_told_as(error))
        _tell([request])

    def _place_or_hold(self, request: OpenRequest, asked: Asked) -> None:
        """Of an accepted request: where no replica serves for now, it waits. Raises EngineDead where none ever will."""
        with self._lock:
            if self._fleet.state == "restarting":
                self._held.append((request, asked))
                return
            self._require_ready()
            self._place(request, asked)

    def _place_held(self) -> None:
        """A replica serves again, or will never."""
        with self._lock:
            held, self._held = self._held, []
        for request, asked in held:
            with request.lock:
                if request.ended():
                    continue
                try:
                    self._place_or_hold(request, asked)
                    continue
                except Exception as error:
                    self._withdraw(request)
                    request.fail(_told_as(error))
            _tell([request])

    def embed(
        self, ids: list[int], params: SamplingParams, pooling: Pooling, sink: Sink, tokens: Int32
    ) -> EmbedRequest:
        """A new request for the embedding of a prompt, by `params` without tokens. Raises as `submit` does.

        tokens  what `check` has made of the prompt
        """
        self._require_ready()
        request = EmbedRequest(next(self._numbers), _new_id(), ids, params, pooling, sink)
        self._open_request(request, self._asked(request, tokens))
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

    def _open_request(self, request: OpenRequest, asked: Asked | None) -> None:
        """`asked` None: it gets its replicas later."""
        with self._lock:
            self._require_ready()
            if request.request_id in self._by_id:
                raise InvalidField("request_id", request.request_id, "an id that no open request has")
            self._open[request.rid] = self._by_id[request.request_id] = request
            if request.each_token:
                self._each_token.add(request.rid)
            try:
                if asked is not None:
                    self._place(request, asked)
            except BaseException:
                self._withdraw(request)
                raise

    def _place(self, request: OpenRequest, asked: Asked) -> None:
        split = request.params.prompt_logprobs is None  # else each would compute them
        shares = self._router.place(asked, range(request.params.n), self._fleet.ready(), split=split)
        request.parts = [Part(*share) for share in shares]
        for index in range(len(shares)):
            self._send(request, index, asked.tokens)

    def _send(self, request: OpenRequest, index: int, tokens: Int32) -> None:
        part = request.parts[index]
        message = parts.submit(request.rid, index, part, tokens, request.params, request.pooling)
        self._fleet.send(part.replica, message)

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

    def abort_all(self, rids: Iterable[int], reason: Ending = "abort") -> None:
        """Aborts those of the requests that are still open; their samples finish with `reason`."""
        with self._lock:
            requests = [self._open[rid] for rid in rids if rid in self._open]
        for request in requests:
            self._abort(request, reason)

    def _abort(self, request: OpenRequest, reason: Ending = "abort") -> None:
        with request.lock:
            if request.ended():
                return
            self._withdraw(request)
            request.abort(reason)
        _tell([request])

    def _withdraw(self, request: OpenRequest) -> None:
        """Forgets the request, and so shall the replicas."""
        with self._lock:
            self._forget(request)
            for index, part in enumerate(request.parts):
                self._fleet.send(part.replica, Cancel(parts.number(request.rid, index)))

    @property
    def open_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def restart_replica(self, number: int, drain: float) -> None:
        """Blocks until the replica, started anew, serves again; see `AsyncEngine.restart_replica`."""
        if not 0 <= number < self._config.dp:
            raise InvalidField("replica", number, f"integers from 0 to {self._config.dp - 1}")
        replica = self._fleet.drain(number)
        deadline = time.monotonic() + drain
        while time.monotonic() < deadline and not self._fleet.closed and self._computes(number):
            time.sleep(DRAIN_LOOK)  # not until something changes: with many open requests that is all the time
        self._fleet.renew(number, replica)

    def _computes(self, replica: int) -> bool:
        """Whether any sample is left to compute there."""
        with self._lock:
            parts = ((one, part) for one in self._open.values() for part in one.parts if part.replica == replica)
            return any(one.error is None and one.runs(part.samples) for one, part in parts)

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
            prompts = [(self._open[news.rid], news) for news in progress.news() if news.rid in self._open]
        for request, news in prompts:
            with request.lock:
                request.learn(news)
        now = time.monotonic()
        for request in begun:
            request.begin(now)
        for request in changed:
            self._advance(request, brought, progress)
        _tell(changed)
        for rid, reason in progress.failed:
            self._fail_one(rid, EngineError(reason))

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

    def _fail_one(self, rid: int, error: TokError) -> None:
        request = self._open.get(rid)
        if request is None:
            return
        with request.lock:
            if request.ended():
                return
            self._withdraw(request)
            request.fail(error)
        _tell([request])

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
                or self.info.max_model_len - len(request.prompt) < least_room(request.params)
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


def _told_as(error: Exception) -> TokError:
    """What the owner of a request is told of whatever kept it from being computed."""
    if isinstance(error, TokError):
        return error
    if isinstance(error, CancelledError):
        return EngineClosed("the engine was closed")
    return EngineError(f"the request cannot be computed: {type(error).__name__}: {error}")


def _new_id() -> str:
    return f"req-{secrets.token_hex(12)}"


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
