"""Take in requests and cancellations: the requests between the engine and the scheduler."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import assert_never

from tok_core.manager.faults import Failures, Faults
from tok_core.manager.grammar_manager import GrammarManager
from tok_core.manager.requests import Request
from tok_core.manager.scheduling import Scheduler
from tok_core.manager.stops import StopSets
from tok_core.messages import Cancel, EngineInfo, Submit

CACHE_SALT_BYTES = 8  # no sum of this, the 16 bytes of a request's salt and the 4 of `_rotation` occurs twice


class RequestIntake:
    """Open requests: submitted to the scheduler, cancelled, failed, or closed after their last sample.

    requests       open requests by rid
    prompt_tokens  tokens of all prompts so far
    """

    def __init__(
        self,
        info: EngineInfo,
        scheduler: Scheduler,
        stops: StopSets,
        grammars: GrammarManager,
        faults: Faults,
    ) -> None:
        self.requests: dict[int, Request] = {}
        self.prompt_tokens = 0
        self._info = info
        self._scheduler = scheduler
        self._stops = stops
        self._grammars = grammars
        self._faults = faults
        self._arrivals = 0
        self._cache = b""  # part of every salt: tells apart what was cached before and after the cache was cleared
        self._cancelled: set[int] = set()  # cancelled requests whose samples may still be in the queue

    def take(self, message: Submit | Cancel) -> None:
        """Submit or cancel a request. A request that raises an exception fails."""
        match message:
            case Submit():
                try:
                    self.submit(message)
                except Exception as error:
                    self._faults.add(message.rid, error)
            case Cancel():
                self.cancel(message.rid)
            case _:
                assert_never(message)

    def submit(self, message: Submit) -> None:
        """Add a request to the scheduler's queue, or let it wait for its grammar to be compiled."""
        self._arrivals += 1
        request = Request(
            message.rid,
            message.prompt,
            message.params,
            self._arrivals,
            self._info.max_model_len,
            message.first_sample,
            message.pooling,
            message.tenant,
            message.salt + self._rotation(len(message.prompt)) + self._cache,
            message.banned,
        )
        self.requests[message.rid] = request
        self.prompt_tokens += len(message.prompt)
        if self._grammars.admit(request):
            self._scheduler.submit(request)

    def submit_compiled(self) -> None:
        """Add requests to the queue whose grammars have been compiled."""
        for request in self._grammars.admitted():
            try:
                self._scheduler.submit(request)
            except Exception as error:
                self._faults.add(request.rid, error)

    def cancel(self, rid: int) -> None:
        """Free everything that the request holds, whatever state its samples are in."""
        request = self.requests.pop(rid, None)
        if request is None:
            return
        self._scheduler.reclaimer.cancel(request)
        self._grammars.leave(request)
        self._cancelled.add(rid)
        if request.left and request.stop_set is not None:  # otherwise its last sample has released it
            self._stops.release(request.stop_set)

    def drop_cancelled(self) -> None:
        """Remove the samples of cancelled requests from the queue, in one pass over it."""
        if self._cancelled:
            self._scheduler.withdraw(self._cancelled)
            self._cancelled = set()

    def cancel_faulty(self) -> Failures:
        """Cancel the requests collected in `faults`, and return them."""
        failures = self._faults.take()
        for rid, _ in chain(*failures):
            self.cancel(rid)
        self.drop_cancelled()
        return failures

    def close(self, rids: Iterable[int]) -> None:
        """Close those of the requests all of whose samples have ended."""
        for rid in rids:
            if rid in self.requests and self.requests[rid].left == 0:
                self._grammars.leave(self.requests.pop(rid))

    def start_new_cache(self) -> None:
        """Let open requests and later ones share no page that was cached before.

        Sequences that run keep their pages, and cache them as before; those that start later compute all their tokens.
        """
        old, new = len(self._cache), int.from_bytes(self._cache) + 1
        self._cache = new.to_bytes(CACHE_SALT_BYTES)
        for request in self.requests.values():
            request.salt = request.salt[: len(request.salt) - old] + self._cache

    def _rotation(self, prompt_len: int) -> bytes:
        """Return a salt that keeps prompts from cached keys of another rotation; see `EngineInfo.short_prompt`."""
        short = self._info.short_prompt
        if short is None or prompt_len <= short:
            return b""
        return (prompt_len if self._info.rope_depends_on_length else 0).to_bytes(4)
