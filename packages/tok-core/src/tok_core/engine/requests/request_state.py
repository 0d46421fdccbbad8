"""State of one open request, from submission to its last token, and the news its owner has not read yet."""

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
    """Tokens of a report for the requests that are told of each, in columns: those of a request side by side.

    Token `i` is one of sample `samples[i]`, and stands in row `rows[i]` of the report. `bounds`: by rid, where the
    request's begin and end. `whole`: by rid, of requests told of ends alone, all of the samples that end.
    """

    samples: list[int]
    tokens: list[int]
    rows: list[int]
    bounds: dict[int, tuple[int, int]]
    whole: Mapping[int, FinishedTexts] = {}


class OpenRequest(ABC):
    """One request from submission to its last token. `sink` is called, on any thread, when it has news: see `take`.

    parts       what each replica computes of it; changed under the engine's lock
    lock        held while it changes
    error       set where the engine could not go on
    each_token  it is told of each token, not only of the ends of its samples
    told        its owner has been told of news that it has not taken: of more it need not be told, unless it has ended
    flooded     its owner has left more tokens than it may: it is told of that by every further report
    pooling     how its prompt is embedded, if that is what is asked for
    tenant      an opaque name of the caller; "" if unknown
    salt        as of `Submit`
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
        self.output_tokens = 0  # that have been told
        self.timings = Timings(submitted=time.monotonic())
        self.error: TokError | None = None
        self.told = False
        self.flooded = False
        self.lock = threading.RLock()
        self._left = params.n
        self._news: list[Delta] = []
        wanted = params.prompt_logprobs
        self._prompt_logprobs = None if wanted is None else PromptLogprobs(prompt, wanted)

    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self._left == 0 or self.error is not None

    def take(self) -> list[Delta]:
        """Return the news since the last call, in order. After `ended` was seen, this is the last of it.

        May set `error`: what has come cannot be made into text. The owner then has to abort the request.
        """
        with self.lock:
            self.told = self.flooded = False
            news, self._news = self._news, []
            return news

    def begin(self, now: float) -> None:
        """A first token has come."""
        if self.timings.first_token is None:
            self.timings.first_token = now

    def learn(self, news: Scores | Embedded) -> None:
        """Takes in what a report tells of its prompt; before `advance` takes in the same report."""
        if self._prompt_logprobs is not None and isinstance(news, Scores):
            self._prompt_logprobs.take(news)

    def prompt_logprobs(self) -> list[TokenLogprob | None] | None:
        """Of its prompt's tokens, if it asks for them and they are there: no later than its first token."""
        return None if self._prompt_logprobs is None else self._prompt_logprobs.whole()

    @abstractmethod
    def advance(self, streamed: StreamedTokens, ends: Mapping[int, Finished], progress: Progress) -> None:
        """Takes in a report: its tokens, if it is told of each, and how samples ended, by their index."""

    @abstractmethod
    def runs(self, samples: range) -> bool:
        """Whether any of these samples has not ended."""

    @abstractmethod
    def restart(self, samples: range) -> bool:
        """Forgets these samples' tokens, to hear of them anew; False where its owner has been told of some."""

    @abstractmethod
    def abort(self, reason: Ending) -> None:
        """Ends every sample that still runs; what was withheld of its text is released."""

    def fail(self, error: TokError) -> None:
        """Ends it with an error."""
        self.error = error

    def free(self) -> None:  # noqa: B027  # most hold little
        """Drop the log-probabilities of a request whose output nobody wants, some at a time; for a thread."""

    def output(self) -> RequestOutput:
        """The whole request, once it is done without error."""
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
        """Its samples, all ended, in order of index."""

    def _count_end(self) -> None:
        if self._left == 1:
            self.timings.finished = time.monotonic()
        self._left -= 1


def token_logprob(params: SamplingParams, token: int, row: int, progress: Progress) -> TokenLogprob:
    """The log-probability of the token in `row`, with as many most likely ones as the request asked for.

    Those that a grammar makes impossible are none, however few are left.
    """
    count = params.logprobs
    top = zip(progress.top_token[row, :count].tolist(), progress.top_logprob[row, :count].tolist(), strict=True)
    if params.grammar is not None:
        top = ((other, logprob) for other, logprob in top if logprob > -math.inf)  # type: ignore[assignment]
    return TokenLogprob(token, float(progress.logprob[row]), tuple(top))
