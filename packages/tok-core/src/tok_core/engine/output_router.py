"""Sort a replica's report by request, pass tokens and ends to the open requests, and notify their owners."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Set
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tok_core.engine.dispatcher import Dispatcher, number_by_request
from tok_core.engine.open_requests import (
    OpenRequest,
    OpenRequests,
    StreamedTokens,
    notify,
    reported_error,
)
from tok_core.engine.token_store import TokenStore, detokenise_finished
from tok_core.errors import InvalidField, RequestFailed, TokError
from tok_core.messages import Finished, Int64, Progress
from tok_core.replicas import Router
from tok_core.sampling_params import SamplingParams
from tok_core.text import Tokenizer


class Delivery(NamedTuple):
    """Contents of a report, by request.

    counted   rids, and the number of tokens of each, int64 [U]
    begun     rids with a sample whose first token is in the report
    streamed  tokens of the requests that are notified of each token
    ends      by rid, the samples that end, by index
    """

    counted: tuple[list[int], Int64]
    begun: list[int]
    streamed: StreamedTokens
    ends: dict[int, dict[int, Finished]]

    def rids(self) -> list[int]:
        """Return the requests that have tokens or ends to be notified of."""
        return [*self.streamed.bounds, *(rid for rid in self.ends if rid not in self.streamed.bounds)]


def group_by_request(
    progress: Progress,
    token_store: TokenStore,
    each_token: Set[int],
    tokenizer: Tokenizer | None,
    whole_text: Mapping[int, SamplingParams],
) -> Delivery:
    """Sort a report by request, and store its tokens. `each_token`, `whole_text`: as in `OpenRequests`."""
    rids, which = _grouped(progress.rid)
    begun, first = [], 0
    for rows in progress.rounds:
        part = slice(first, first := first + rows)
        begun += token_store.append(rids, which[part], progress.sample[part], progress.token[part])
    ends: dict[int, dict[int, Finished]] = {}
    for end in progress.finished:
        ends.setdefault(end.rid, {})[end.sample] = end
    counted = rids, np.bincount(which, minlength=len(rids))
    streamed = _streamed_tokens(progress, rids, which, each_token) if each_token else NOTHING
    if progress.finished:
        streamed = streamed._replace(whole=detokenise_finished(progress.finished, token_store, tokenizer, whole_text))
    return Delivery(counted, begun, streamed, ends)


def _grouped(rid: Int64) -> tuple[list[int], Int64]:
    """Return the distinct rids in order, and for each row the index of its rid among them.

    Same as `np.unique` with `return_inverse`, but faster for few rows.
    """
    order = rid.argsort(kind="stable")
    ordered = rid[order]
    differs = np.ones(len(rid), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=differs[1:])
    which = np.empty(len(rid), np.int64)
    which[order] = differs.cumsum() - 1
    return ordered[differs].tolist(), which


def _streamed_tokens(progress: Progress, rids: list[int], which: Int64, each_token: Set[int]) -> StreamedTokens:
    is_streamed = np.array([rid in each_token for rid in rids], np.bool_)
    rows = np.flatnonzero(is_streamed[which])
    rows = rows[np.argsort(which[rows], kind="stable")]
    stops = np.searchsorted(which[rows], np.flatnonzero(is_streamed), side="right").tolist()
    streamed = (rid for rid, included in zip(rids, is_streamed.tolist(), strict=True) if included)
    return StreamedTokens(
        progress.sample[rows].tolist(),
        progress.token[rows].tolist(),
        rows.tolist(),
        dict(zip(streamed, pairwise([0, *stops]), strict=True)),
    )


NOTHING = StreamedTokens([], [], [], {})
NO_ENDS: Mapping[int, Finished] = {}
log = logging.getLogger("tok_core")


class OutputRouter:
    """Thread-safe router of reports to open requests.

    `lock` is the engine's; detokenisation happens outside of it. `tokenizer` is set before the first report.
    """

    def __init__(
        self,
        requests: OpenRequests,
        dispatcher: Dispatcher,
        router: Router,
        token_store: TokenStore,
        lock: threading.RLock,
    ) -> None:
        self._requests = requests
        self._dispatcher = dispatcher
        self._router = router
        self._token_store = token_store
        self._lock = lock
        self.tokenizer: Tokenizer | None = None

    def deliver(self, replica: int, progress: Progress) -> None:
        """Deliver one report to its requests, and call each sink once. A request that raises an error fails alone."""
        if progress.has_only_stats:
            return
        if self._router.several:
            progress = number_by_request(progress)
        delivery = group_by_request(
            progress, self._token_store, self._requests.each_token, self.tokenizer, self._requests.whole_text
        )
        by_rid = self._requests.by_rid
        with self._lock:
            self._record_progress(replica, progress, delivery)
            begun = self._requests.some(delivery.begun)
            changed = self._requests.some(delivery.rids())
            prompts = [(by_rid[output.rid], output) for output in progress.prompt_outputs() if output.rid in by_rid]
        faults: list[tuple[OpenRequest, Exception]] = []
        for request, output in prompts:
            with request.lock:
                try:
                    request.add_prompt_output(output)
                except Exception as error:
                    faults.append((request, error))
        now = time.monotonic()
        for request in begun:
            request.begin(now)
        for rid, reason in progress.failed:
            for request in self._requests.some([rid]):
                self._fail(request, RequestFailed(reason))
        for rid, allowed in progress.refused:
            for request in self._requests.some([rid]):
                grammar = request.params.grammar
                self._fail(request, InvalidField("grammar", grammar.value if grammar is not None else "", allowed))
        self._fail_faulty(faults)
        notify(self._advance(changed, delivery, progress))

    def _record_progress(self, replica: int, progress: Progress, delivery: Delivery) -> None:
        """Record which open requests have started, and update the router's loads."""
        by_rid = self._requests.by_rid
        if progress.started:
            now = time.monotonic()
            for rid, cached, age in progress.started:
                if rid in by_rid:
                    by_rid[rid].start(cached, now - age)
        if not self._router.several:
            return
        self._router.report(replica, *delivery.counted)
        for rid, ends in delivery.ends.items():
            if rid in by_rid:
                self._router.end(replica, rid, by_rid[rid].params, ends)

    def _advance(self, requests: list[OpenRequest], delivery: Delivery, progress: Progress) -> list[OpenRequest]:
        """Advance the requests by the report, and return those to notify. Fail requests that raise an error."""
        notified, over = [], []
        faults: list[tuple[OpenRequest, Exception]] = []
        for request in requests:
            ends = delivery.ends.get(request.rid, NO_ENDS)
            with request.lock:  # an abort happens entirely before or after this
                if request.ended():
                    continue
                try:
                    request.advance(delivery.streamed, ends, progress)
                except Exception as error:
                    faults.append((request, error))
                    continue
                if ends and request.ended():
                    over.append(request)
                    if request.each_token or request.params.n > 1:  # an owner notified before may reuse the id at once
                        self._dispatcher.remove([request])
                elif request.notified and not request.flooded:
                    continue  # the owner has not called `take` since its last notification
                request.notified = True
                notified.append(request)
        if over:
            self._dispatcher.remove(over)
            self._token_store.close_all([request.rid for request in over])
        self._fail_faulty(faults)
        return notified

    def _fail_faulty(self, faults: list[tuple[OpenRequest, Exception]]) -> None:
        for request, error in faults:
            log.error("request %s cannot be answered", request.request_id, exc_info=error)
            self._fail(request, reported_error(error))

    def _fail(self, request: OpenRequest, error: TokError) -> None:
        with request.lock:
            if request.error is not None or not self._requests.some([request.rid]):
                return  # the request has failed or was aborted meanwhile
            self._dispatcher.withdraw(request)
            request.fail(error)
        notify([request])
