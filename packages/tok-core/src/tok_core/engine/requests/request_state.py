"""State of one open request, from submission to its last token, with the deltas its owner has not taken yet."""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tok_core.engine.finished_texts import FinishedTexts
from tok_core.engine.requests.prompt_logprobs import PromptLogprobs
from tok_core.engine.requests.request_parts import RequestPart
from tok_core.errors import TokError
from tok_core.messages import Embedded, Finished, Progress, Scores
from tok_core.outputs import Completion, Delta, Ending, Pooling, RequestOutput, Timings, TokenLogprob
from tok_core.sampling_params import SamplingParams

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


class OpenRequest(ABC):
    """One request from submission to its last token. `sink` is called, on any thread, when `take` has something.

    parts       samples that each replica computes; changed under the engine's lock
    lock        held while the request changes
    error       set if the engine cannot go on with the request
    each_token  receive each token, not only the ends of samples
    notified    whether the owner has been notified and has not called `take` since: further reports notify it only if
                the request has ended
    flooded     whether more tokens wait to be taken than allowed; each further report notifies the owner then
    pooling     how to pool the prompt's embedding, for embedding requests
    tenant      an opaque name of the caller; "" if unknown
    salt        as in `Submit`
    """

    each_token: bool
    pooling: Pooling | None = None
    tenant: str = ""
    salt: bytes = b""

    def __init__(self, rid: int, request_id: str, prompt: list[int], params: SamplingParams, sink: Sink) -> None:
        self.rid = rid
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.sink = sink
        self.parts: list[RequestPart] = []
        self.cached_tokens = 0
        self.output_tokens = 0  # tokens reported so far
        self.timings = Timings(submitted=time.monotonic())
        self.error: TokError | None = None
        self.notified = False
        self.flooded = False
        self.lock = threading.RLock()
        self._left = params.n
        self._deltas: list[Delta] = []
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

    def begin(self, now: float) -> None:
        """Note the arrival of a first token."""
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

    def fail(self, error: TokError) -> None:
        """End the request with an error."""
        self.error = error

    def free(self) -> None:  # noqa: B027  # most hold little
        """Free the log-probabilities of an aborted request in portions; run in a thread."""

    def output(self) -> RequestOutput:
        """Return the whole request, which must have ended without error."""
        return RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=self.prompt,
            outputs=self._completions(),
            cached_tokens=self.cached_tokens,
            timings=self.timings,
            prompt_logprobs=self.prompt_logprobs(),
        )

    @abstractmethod
    def _completions(self) -> list[Completion]:
        """Return the samples, all of which have ended, in order of index."""

    def _count_end(self) -> None:
        if self._left == 1:
            self.timings.finished = time.monotonic()
        self._left -= 1


def token_logprob(params: SamplingParams, token: int, row: int, progress: Progress) -> TokenLogprob:
    """Return the log-probability of the token in `row`, with as many most likely tokens as the request asks for.

    Tokens that a grammar rules out are left out, even if fewer remain.
    """
    count = params.logprobs
    top = zip(progress.top_token[row, :count].tolist(), progress.top_logprob[row, :count].tolist(), strict=True)
    if params.grammar is not None:
        top = ((other, logprob) for other, logprob in top if logprob > -math.inf)  # type: ignore[assignment]
    return TokenLogprob(token, float(progress.logprob[row]), tuple(top))
