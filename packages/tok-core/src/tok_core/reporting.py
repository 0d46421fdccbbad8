"""Reporting: what a replica reports is handed out to the open requests, and their owners are told."""

from __future__ import annotations

import threading
import time

from tok_core import parts
from tok_core.assembly import OpenRequest
from tok_core.delivery import NO_ENDS, Delivery, sort_out
from tok_core.errors import EngineError, TokError
from tok_core.ledger import Ledger
from tok_core.messages import Progress
from tok_core.open_requests import OpenRequests
from tok_core.placing import Placing
from tok_core.routing import Router
from tok_core.telling import tell
from tok_core.text.tokenizer import Tokenizer


class Reporting:
    """Thread-safe; `lock` is the engine's. Texts are made outside of it. `tokenizer`: set before the first report."""

    def __init__(
        self, requests: OpenRequests, placing: Placing, router: Router, ledger: Ledger, lock: threading.RLock
    ) -> None:
        self._requests = requests
        self._placing = placing
        self._router = router
        self._ledger = ledger
        self._lock = lock
        self.tokenizer: Tokenizer | None = None

    def deliver(self, replica: int, progress: Progress) -> None:
        """Hands out what one report brought: one call a sink."""
        if progress.figures_only:
            return
        if self._router.several:
            progress = parts.of_requests(progress)
        brought = sort_out(progress, self._ledger, self._requests.each_token, self.tokenizer)
        open_ones = self._requests.by_rid
        with self._lock:
            self._note_progress(replica, progress, brought)
            begun = self._requests.some(brought.begun)
            changed = self._requests.some(brought.rids())
            prompts = [(open_ones[news.rid], news) for news in progress.news() if news.rid in open_ones]
        for request, news in prompts:
            with request.lock:
                request.learn(news)
        now = time.monotonic()
        for request in begun:
            request.begin(now)
        tell(self._advance(changed, brought, progress))
        for rid, reason in progress.failed:
            self._fail(rid, EngineError(reason))

    def _note_progress(self, replica: int, progress: Progress, brought: Delivery) -> None:
        """What the open requests and the router are to know of a report."""
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
        """Those whose owners are to be told."""
        heard, over = [], []
        for request in requests:
            ends = brought.ends.get(request.rid, NO_ENDS)
            with request.lock:  # an abort comes before or after
                if request.ended():
                    continue
                request.advance(brought.told, ends, progress)
                if ends and request.ended():
                    over.append(request)
                    if request.each_token or request.params.n > 1:  # its owner may read the end at once: its id is free
                        self._placing.forget([request])
                elif request.told:
                    continue  # and its owner has not looked since
                request.told = True
                heard.append(request)
        if over:
            self._placing.forget(over)
            self._ledger.close_all([request.rid for request in over])
        return heard

    def _fail(self, rid: int, error: TokError) -> None:
        for request in self._requests.some([rid]):
            with request.lock:
                if request.ended():
                    return
                self._placing.withdraw(request)
                request.fail(error)
            tell([request])
