"""State of open requests, from submission to the last token, with the deltas that their owners have not taken yet."""

from __future__ import annotations

import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tok_core.engine.token_store import FinishedTexts
from tok_core.errors import EngineClosed, InvalidField, RequestFailed, TokError
from tok_core.messages import Embedded, Finished, Float32, Int32, Progress, Scores
from tok_core.outputs import (
    DEFAULT_WEIGHT_VERSION,
    Completion,
    Delta,
    Ending,
    Pooling,
    RequestOutput,
    Timings,
    TokenLogprob,
)
from tok_core.sampling_params import SamplingParams


class RequestPart(NamedTuple):
    """Samples of a request that one replica computes. `redispatched`: they were lost with another replica before."""

    replica: int
    samples: range
    redispatched: bool = False


ROWS_AT_ONCE = 256  # prompt tokens, with up to 100 top log-probabilities each: larger portions hold the GIL for long

TokenSequences = tuple[tuple[int, ...], ...]
Sink = Callable[[Sequence["OpenRequest"]], None]


class StreamedTokens(NamedTuple):
    """Tokens of a report for the requests that receive each token, as columns with a request's tokens side by side.

    samples  index of each token's sample
    rows     row of each token in the report
    bounds   by rid, the range [first, end) of the request's tokens
    whole    by rid, ids and texts of the samples of unstreamed requests that end with the report
    """

    samples: list[int]
    tokens: list[int]
    rows: list[int]
    bounds: dict[int, tuple[int, int]]
    whole: Mapping[int, FinishedTexts] = {}


class PromptLogprobs:
    """Log-probabilities of a `prompt`'s tokens, with the `top` most likely ones at each. Chunks may arrive twice."""

    def __init__(self, prompt: list[int], top: int) -> None:
        self._prompt = prompt
        self._logprob: Float32 = np.zeros(len(prompt), np.float32)
        self._rank: Int32 = np.zeros(len(prompt), np.int32)
        self._top_token: Int32 = np.zeros((len(prompt), top), np.int32)
        self._top_logprob: Float32 = np.zeros((len(prompt), top), np.float32)
        self._known: NDArray[np.bool_] = np.zeros(len(prompt), np.bool_)
        self._known[0] = True  # the first token has no log-probability, since no token precedes it
        self._whole: list[TokenLogprob | None] | None = None

    def take(self, scores: Scores) -> None:
        """Store the scores of one chunk."""
        at, top = slice(scores.first, scores.first + len(scores.logprob)), self._top_token.shape[1]
        self._logprob[at], self._rank[at] = scores.logprob, scores.rank
        self._top_token[at] = scores.top_token[:, :top]
        self._top_logprob[at] = scores.top_logprob[:, :top]
        self._known[at] = True

    def whole(self) -> list[TokenLogprob | None] | None:
        """Return an entry for each token, None for the first; return None while any is missing. The list is cached."""
        if self._whole is None and self._known.all():
            starts = range(0, len(self._prompt), ROWS_AT_ONCE)
            self._whole = [entry for start in starts for entry in self._converted(start)]
            self._whole[0] = None
        return self._whole

    def free(self) -> None:
        """Free the entries in portions."""
        while self._whole:
            del self._whole[-ROWS_AT_ONCE:]

    def _converted(self, start: int) -> Iterator[TokenLogprob]:
        """Return the entries of some tokens from `start` on."""
        at = slice(start, start + ROWS_AT_ONCE)
        tops = zip(self._top_token[at].tolist(), self._top_logprob[at].tolist(), strict=True)
        rows = zip(self._prompt[at], self._logprob[at].tolist(), tops, self._rank[at].tolist(), strict=True)
        return (TokenLogprob(token, logprob, tuple(zip(*top, strict=True)), rank) for token, logprob, top, rank in rows)


class OpenRequest(ABC):
    """One request from submission to its last token. `sink` is called, on any thread, when `take` has something.

    parts       samples that each replica computes; changed under the engine's lock
    lock        held while the request changes
    error       set if the engine cannot go on with the request
    lengths     numbers of tokens of the samples that have ended
    each_token  receive each token, not only the ends of samples
    notified    whether the owner has been notified and has not called `take` since: further reports notify it only if
                the request has ended
    flooded     whether more tokens wait to be taken than allowed; each further report notifies the owner then
    pooling     how to pool the prompt's embedding, for embedding requests
    tenant      an opaque name of the caller; "" if unknown
    salt, banned   as in `Submit`
    weight_version  version of the weights that compute further tokens
    """

    each_token: bool
    pooling: Pooling | None = None
    tenant: str = ""
    salt: bytes = b""
    banned: TokenSequences = ()
    weight_version = DEFAULT_WEIGHT_VERSION

    def __init__(self, rid: int, request_id: str, prompt: list[int], params: SamplingParams, sink: Sink) -> None:
        self.rid = rid
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.sink = sink
        self.parts: list[RequestPart] = []
        self.cached_tokens = 0
        self.output_tokens = 0  # tokens reported so far
        self.lengths: list[int] = []
        self.timings = Timings(submitted=time.monotonic())
        self.error: TokError | None = None
        self.notified = False
        self.flooded = False
        self.lock = threading.RLock()
        self._left = params.n
        self._deltas: list[Delta] = []
        self._weight_spans: dict[int, list[tuple[str, int]]] = {}  # by sample; none: all by `weight_version`
        wanted = params.prompt_logprobs
        self._prompt_logprobs = None if wanted is None else PromptLogprobs(prompt, wanted)

    def ended(self) -> bool:
        """Return whether all samples have ended or the request has failed."""
        return self._left == 0 or self.error is not None

    def take(self) -> list[Delta]:
        """Return the deltas since the last call, in order. If `ended` was true before, no more follow.

        Sets `error` if tokens cannot be detokenised. The owner then has to abort the request.
        """
        with self.lock:
            self.notified = self.flooded = False
            deltas, self._deltas = self._deltas, []
            return deltas

    def start(self, cached_tokens: int, at: float) -> None:
        """Record that the first sample got a slot at the time `at`, with this number of cached prompt tokens."""
        self.cached_tokens = cached_tokens
        self.timings.started = max(at, self.timings.submitted)  # earlier only if a clock has jumped

    def begin(self, now: float) -> None:
        """Record the arrival of the first token."""
        if self.timings.first_token is None:
            self.timings.first_token = now

    def add_prompt_output(self, output: Scores | Embedded) -> None:
        """Store a report's prompt log-probabilities or embedding. Called before `advance` with the same report."""
        if self._prompt_logprobs is not None and isinstance(output, Scores):
            self._prompt_logprobs.take(output)

    def prompt_logprobs(self) -> list[TokenLogprob | None] | None:
        """Return the prompt's log-probabilities, if requested and complete: no later than the first token."""
        return None if self._prompt_logprobs is None else self._prompt_logprobs.whole()

    @abstractmethod
    def advance(self, streamed: StreamedTokens, ends: Mapping[int, Finished], progress: Progress) -> None:
        """Store a report: its tokens, if `each_token`, and the ends of samples, by index."""

    @abstractmethod
    def runs(self, samples: range) -> bool:
        """Return whether any of these samples has not ended."""

    @abstractmethod
    def restart(self, samples: range) -> bool:
        """Drop the tokens of these samples before they are computed again.

        Returns False if that is too late, since their owner may have been notified of some of their output.
        """

    @abstractmethod
    def abort(self, reason: Ending) -> None:
        """End every sample that still runs, and release its withheld text."""

    def change_weights(self, version: str) -> None:
        """Record that weights of this version compute all further tokens."""
        for index in range(self.params.n):
            count = self.tokens_so_far(index)
            if count == 0:
                self._weight_spans.pop(index, None)
                continue
            spans = self._weight_spans.setdefault(index, [(self.weight_version, 0)])
            if count is not None:
                if spans[-1][1] == count:
                    spans.pop()
                spans.append((version, count))
        self.weight_version = version

    @abstractmethod
    def tokens_so_far(self, index: int) -> int | None:
        """Return the number of tokens of a sample that has not ended; None if it has."""

    def weights_of(self, index: int, tokens: int) -> tuple[str, list[tuple[str, int]] | None]:
        """Return `weight_version` and `weight_spans` of the first `tokens` tokens of a sample."""
        with self.lock:
            spans = self._weight_spans.get(index)
            if spans is None:
                return self.weight_version, None
            spans = [span for span in spans if span[1] < tokens] or spans[:1]
            return spans[-1][0], spans if len(spans) > 1 else None

    def _forget_weights(self, samples: range) -> None:
        """Forget the weight versions of samples that are computed again."""
        for index in samples:
            self._weight_spans.pop(index, None)

    def fail(self, error: TokError) -> None:
        """End the request with an error."""
        self.error = error

    def free(self) -> None:
        """Free the log-probabilities of an ended request in portions; run in a thread."""
        if self._prompt_logprobs is not None:
            self._prompt_logprobs.free()

    def output(self) -> RequestOutput:
        """Return the whole request, which must have ended without error."""
        return RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=self.prompt,
            outputs=self._completions(),
            cached_tokens=self.cached_tokens,
            timings=self.timings,
            prompt_logprobs=self.prompt_logprobs(),
            weight_version=self.weight_version,
        )

    @abstractmethod
    def _completions(self) -> list[Completion]:
        """Return the samples, all of which have ended, in order of index."""

    def _count_end(self, tokens: int) -> None:
        """Count the end of a sample of this number of tokens."""
        self.lengths.append(tokens)
        if self._left == 1:
            self.timings.finished = time.monotonic()
        self._left -= 1


def token_logprob(params: SamplingParams, token: int, row: int, progress: Progress) -> TokenLogprob:
    """Return the log-probability of the token in `row`, with the top log-probabilities that the request asks for.

    Tokens that a grammar or `allowed_token_ids` rules out are left out, even if fewer remain.
    """
    count = params.logprobs
    top = zip(progress.top_token[row, :count].tolist(), progress.top_logprob[row, :count].tolist(), strict=True)
    if params.grammar is not None or params.allowed_token_ids is not None:
        top = ((other, logprob) for other, logprob in top if logprob > -math.inf)  # type: ignore[assignment]
    return TokenLogprob(token, float(progress.logprob[row]), tuple(top))


log = logging.getLogger("tok_core")


def notify(requests: Sequence[OpenRequest]) -> None:
    """Call each sink once with its requests. An exception in one sink is logged and does not affect others."""
    by_sink: dict[Sink, list[OpenRequest]] = {}
    for request in requests:
        by_sink.setdefault(request.sink, []).append(request)
    for sink, owned in by_sink.items():
        try:
            sink(owned)
        except Exception:
            log.exception("the callback of %d requests failed, %s one of them", len(owned), owned[0].request_id)


def reported_error(error: Exception) -> TokError:
    """Return the error to report to the owner of a request that failed with `error`."""
    if isinstance(error, TokError):
        return error
    if isinstance(error, CancelledError):
        return EngineClosed("the engine was closed")
    return RequestFailed(f"the request cannot be computed: {type(error).__name__}: {error}")


class OpenRequests:
    """Thread-safe collection of open requests. `changed` is the engine's lock, notified of every removal.

    by_rid      requests by the engine's number; read it under the lock
    each_token  numbers of the requests that need every token: streamed ones, and those with log-probabilities
    weight_version  version of the weights in use
    whole_text  parameters, by number, of the requests whose texts include special tokens or the stop string or id
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self.weight_version = DEFAULT_WEIGHT_VERSION
        self._by_id: dict[str, OpenRequest] = {}
        self.by_rid: dict[int, OpenRequest] = {}
        self.each_token: set[int] = set()
        self.whole_text: dict[int, SamplingParams] = {}

    def __len__(self) -> int:
        return len(self.by_rid)

    def add(self, request: OpenRequest) -> None:
        """Add a request. Raise InvalidField if an open request has its id."""
        with self._changed:
            if request.request_id in self._by_id:
                raise InvalidField("request_id", request.request_id, "an id that no open request has")
            self.by_rid[request.rid] = self._by_id[request.request_id] = request
            request.weight_version = self.weight_version
            if request.each_token:
                self.each_token.add(request.rid)
            if not request.params.skip_special_tokens or request.params.include_stop_str_in_output:
                self.whole_text[request.rid] = request.params

    def remove(self, requests: Iterable[OpenRequest]) -> list[OpenRequest]:
        """Remove requests; return those that were open."""
        with self._changed:
            gone = [request for request in requests if self.by_rid.pop(request.rid, None) is not None]
            for request in gone:
                del self._by_id[request.request_id]
                self.each_token.discard(request.rid)
                self.whole_text.pop(request.rid, None)
            if gone:
                self._changed.notify_all()
            return gone

    def change_weights(self, version: str) -> None:
        """Record that weights of this version compute all further tokens. No replica may be computing now."""
        with self._changed:
            self.weight_version, requests = version, list(self.by_rid.values())
        for request in requests:
            with request.lock:
                request.change_weights(version)

    def named(self, request_id: str) -> OpenRequest | None:
        """Return the request with this id, if it is open."""
        with self._changed:
            return self._by_id.get(request_id)

    def with_prefix(self, prefix: str) -> list[OpenRequest]:
        """Return the open requests whose ids begin with `prefix`."""
        with self._changed:
            return [request for name, request in self._by_id.items() if name.startswith(prefix)]

    def some(self, rids: Iterable[int]) -> list[OpenRequest]:
        """Return the requests among `rids` that are still open, in the order of `rids`."""
        with self._changed:
            return [self.by_rid[rid] for rid in rids if rid in self.by_rid]

    def all(self) -> list[OpenRequest]:
        """Return all open requests."""
        with self._changed:
            return list(self.by_rid.values())

    def of_replica(self, replica: int) -> list[OpenRequest]:
        """Return the requests with a part assigned to the replica."""
        with self._changed:
            requests = self.by_rid.values()
            return [request for request in requests if any(part.replica == replica for part in request.parts)]
