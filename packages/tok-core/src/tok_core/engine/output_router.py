"""Route the tokens and ends in a replica's report to the open requests and notify their owners."""

from __future__ import annotations

import logging
import threading
import time

from tok_core.engine.delivery import NO_ENDS, Delivery, group_by_request
from tok_core.engine.dispatcher import Dispatcher
from tok_core.engine.open_requests import OpenRequests
from tok_core.engine.requests import OpenRequest, notify, reported_error, request_parts
from tok_core.engine.token_store import TokenStore
from tok_core.errors import InvalidField, RequestFailed, TokError
from tok_core.messages import Progress
from tok_core.replicas import Router
from tok_core.text import Tokenizer

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
        if progress.figures_only:
            return
        if self._router.several:
            progress = request_parts.of_requests(progress)
        brought = group_by_request(progress, self._token_store, self._requests.each_token, self.tokenizer)
        open_ones = self._requests.by_rid
        with self._lock:
            self._note_progress(replica, progress, brought)
            begun = self._requests.some(brought.begun)
            changed = self._requests.some(brought.rids())
            prompts = [(open_ones[one.rid], one) for one in progress.prompt_outputs() if one.rid in open_ones]
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
        notify(self._advance(changed, brought, progress))

    def _note_progress(self, replica: int, progress: Progress, brought: Delivery) -> None:
        """Update cached-token counts of open requests, and the router's loads."""
        open_ones = self._requests.by_rid
        for rid, cached in progress.cached:
            if rid in open_ones:
                open_ones[rid].cached_tokens = cached
        if not self._router.several:
            return
        self._router.report(replica, *brought.counted)
        for rid, ends in brought.ends.items():
            if rid in open_ones:
                self._router.end(replica, rid, open_ones[rid].params, ends)

    def _advance(self, requests: list[OpenRequest], brought: Delivery, progress: Progress) -> list[OpenRequest]:
        """Advance the requests by the report, and return those to notify. Fail requests that raise an error."""
        heard, over = [], []
        faults: list[tuple[OpenRequest, Exception]] = []
        for request in requests:
            ends = brought.ends.get(request.rid, NO_ENDS)
            with request.lock:  # an abort happens entirely before or after this
                if request.ended():
                    continue
                try:
                    request.advance(brought.streamed, ends, progress)
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
                heard.append(request)
        if over:
            self._dispatcher.remove(over)
            self._token_store.close_all([request.rid for request in over])
        self._fail_faulty(faults)
        return heard

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
