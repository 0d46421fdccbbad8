"""StreamedRequest: a request whose owner receives tokens while they are generated.

A report's tokens are only stored, and detokenised when the owner calls `take`. A slow owner gets several tokens in one
delta, which costs less CPU time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from tok_core.engine.requests.notifications import reported_error
from tok_core.engine.requests.request_state import OpenRequest, Sink, StreamedTokens, token_logprob
from tok_core.messages import Finished, Progress
from tok_core.outputs import Completion, Delta, Ending, TokenLogprob
from tok_core.sampling_params import SamplingParams
from tok_core.text import Detokeniser, Tokenizer

log = logging.getLogger("tok_core")

NOTHING = (0, 0)

# Memory of an untaken token, in bytes: its id in a list, its log-probability, and each of its most likely tokens.
TOKEN_BYTES, LOGPROB_BYTES, LIKELY_BYTES = 40, 180, 150


class _Sample:
    """Tokens of one sample: `fresh` ones, which its owner has not taken, and `count` taken ones."""

    __slots__ = ("count", "detokeniser", "end", "fresh", "logprobs", "taken", "text", "token_ids")

    def __init__(self, detokeniser: Detokeniser | None, logprobs: bool) -> None:
        self.detokeniser = detokeniser
        self.fresh: list[int] = []
        self.token_ids: list[int] = []
        self.text: list[str] = []
        self.logprobs: list[TokenLogprob] | None = [] if logprobs else None
        self.end: Finished | None = None
        self.count = 0
        self.taken = False  # whether a delta of the sample was taken


class StreamedRequest(OpenRequest):
    """A request whose owner is notified of tokens while they are generated."""

    each_token = True

    def __init__(
        self,
        rid: int,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        sink: Sink,
        tokenizer: Tokenizer | None,
    ) -> None:
        super().__init__(rid, request_id, prompt, params, sink)
        wants = params.logprobs is not None
        self._samples = [
            _Sample(None if tokenizer is None else Detokeniser(tokenizer, params.stop), wants) for _ in range(params.n)
        ]
        self._keeps = True
        self._taken = 0  # tokens taken
        self._most_unread: int | None = None  # maximum number of untaken tokens
        self._changed: dict[int, None] = {}  # samples with something to take, in order of arrival

    def bound(self, most: int) -> None:
        """Keep no tokens that were taken, and set `flooded` while untaken tokens need more than `most` bytes."""
        logprobs = self.params.logprobs
        each = TOKEN_BYTES + (0 if logprobs is None else LOGPROB_BYTES + logprobs * LIKELY_BYTES)
        with self.lock:
            self._keeps, self._most_unread = False, most // each

    def advance(self, streamed: StreamedTokens, ends: Mapping[int, Finished], progress: Progress) -> None:
        first, end = streamed.bounds.get(self.rid, NOTHING)
        if first < end and not self.output_tokens:
            self.begin(time.monotonic())
        self.output_tokens += end - first
        for i in range(first, end):
            index, token = streamed.samples[i], streamed.tokens[i]
            sample = self._samples[index]
            sample.fresh.append(token)
            self._changed[index] = None
            if sample.logprobs is not None:
                sample.logprobs.append(token_logprob(self.params, token, streamed.rows[i], progress))
        for index, how in ends.items():
            self._end(index, how)
        if self._most_unread is not None and self.output_tokens - self._taken > self._most_unread:
            self.flooded = True

    def take(self) -> list[Delta]:
        with self.lock:
            if self.error is None:
                try:
                    self._note_changes()
                except Exception as error:
                    log.exception("request %s cannot be answered", self.request_id)
                    self.fail(reported_error(error))
            return super().take()

    def runs(self, samples: range) -> bool:
        return any(self._samples[index].end is None for index in samples)

    def restart(self, samples: range) -> bool:
        return not any(self._samples[index].count or self._samples[index].fresh for index in samples)

    def abort(self, reason: Ending) -> None:
        for index, sample in enumerate(self._samples):
            if sample.end is None:
                self._end(index, Finished(self.rid, index, reason, sample.count + len(sample.fresh)))

    def _end(self, index: int, end: Finished) -> None:
        self._samples[index].end = end
        self._changed[index] = None
        self._count_end()

    def _note_changes(self) -> None:
        for index in self._changed:
            self._deltas.append(self._delta(index, self._samples[index]))
        self._changed.clear()

    def _delta(self, index: int, sample: _Sample) -> Delta:
        """Return the sample's new tokens and text since the last delta."""
        ids, end, logprobs = sample.fresh, sample.end, sample.logprobs
        text = _text(sample.detokeniser, ids, end)
        if logprobs is not None:
            logprobs = logprobs[len(logprobs) - len(ids) :] or None
        prompt_logprobs = None if sample.taken else self.prompt_logprobs()
        sample.fresh, sample.taken = [], True
        sample.count += len(ids)
        self._taken += len(ids)
        if self._keeps:
            sample.token_ids += ids
            sample.text.append(text)
        elif sample.logprobs is not None:
            sample.logprobs = []
        if end is None:
            return Delta(index, ids, text, logprobs, None, None, prompt_logprobs)
        sample.detokeniser = None
        return Delta(index, ids, text, logprobs, end.reason, end.stop, prompt_logprobs)

    def _completions(self) -> list[Completion]:
        self._note_changes()
        return [_completion(index, sample) for index, sample in enumerate(self._samples)]


def _text(detokeniser: Detokeniser | None, ids: list[int], end: Finished | None) -> str:
    """Return the text that can be shown after the tokens `ids`, and after `end`, if the sample has ended."""
    if detokeniser is None:
        return ""
    if end is None:
        return detokeniser.push(ids)
    # An end token is never shown, whether or not the tokenizer marks it as special.
    ended_by_token = end.reason == "stop" and end.cut is None
    return detokeniser.push(ids[:-1] if ended_by_token else ids) + detokeniser.finish(end.cut)


def _completion(index: int, sample: _Sample) -> Completion:
    assert sample.end is not None
    return Completion(
        index=index,
        token_ids=sample.token_ids,
        text="".join(sample.text),
        logprobs=sample.logprobs,
        finish_reason=sample.end.reason,
        stop_reason=sample.end.stop,
    )
