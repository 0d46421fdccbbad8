"""StreamedRequest and UnstreamedRequest: requests whose owners receive tokens as they come, or finished samples."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from tok_core.engine.open_requests import OpenRequest, Sink, StreamedTokens, reported_error, token_logprob
from tok_core.engine.token_store import TokenStore, hides_last_token
from tok_core.errors import TokError
from tok_core.messages import Finished, Progress
from tok_core.outputs import Completion, Delta, Ending, FinishReason, TokenLogprob
from tok_core.sampling_params import SamplingParams
from tok_core.text import Detokeniser, Tokenizer

log = logging.getLogger("tok_core")
NO_ROWS = (0, 0)
# Bytes of an untaken token: its id in a list, its log-probability, and each of its top log-probabilities.
TOKEN_BYTES, LOGPROB_BYTES, TOP_LOGPROB_BYTES = 40, 180, 150


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
    """A request whose owner is notified of tokens while they are generated.

    A report's tokens are only stored, and detokenised when the owner calls `take`. A slow owner gets several tokens in
    one delta, which costs less CPU time.
    """

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
            _Sample(
                None if tokenizer is None else Detokeniser(tokenizer, params.stop, params.skip_special_tokens), wants
            )
            for _ in range(params.n)
        ]
        self._keeps = True
        self._taken = 0  # tokens taken
        self._max_untaken: int | None = None  # tokens
        self._changed: dict[int, None] = {}  # samples with something to take, in order of arrival

    def bound(self, max_bytes: int) -> None:
        """Keep no tokens that were taken, and set `flooded` while untaken tokens need more than `max_bytes`."""
        logprobs = self.params.logprobs
        token_bytes = TOKEN_BYTES + (0 if logprobs is None else LOGPROB_BYTES + logprobs * TOP_LOGPROB_BYTES)
        with self.lock:
            self._keeps, self._max_untaken = False, max_bytes // token_bytes

    def advance(self, streamed: StreamedTokens, ends: Mapping[int, Finished], progress: Progress) -> None:
        first, end = streamed.bounds.get(self.rid, NO_ROWS)
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
        for index, end_of_sample in ends.items():
            self._end(index, end_of_sample)
        if self._max_untaken is not None and self.output_tokens - self._taken > self._max_untaken:
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
        self._forget_weights(samples)
        return not any(self._samples[index].count or self._samples[index].fresh for index in samples)

    def tokens_so_far(self, index: int) -> int | None:
        sample = self._samples[index]
        return sample.count + len(sample.fresh) if sample.end is None else None

    def abort(self, reason: Ending) -> None:
        for index, sample in enumerate(self._samples):
            if sample.end is None:
                self._end(index, Finished(self.rid, index, reason, sample.count + len(sample.fresh)))

    def _end(self, index: int, end: Finished) -> None:
        self._samples[index].end = end
        self._changed[index] = None
        self._count_end(end.tokens)

    def _note_changes(self) -> None:
        for index in self._changed:
            self._deltas.append(self._delta(index, self._samples[index]))
        self._changed.clear()

    def _delta(self, index: int, sample: _Sample) -> Delta:
        """Return the sample's new tokens and text since the last delta."""
        ids, end, logprobs = sample.fresh, sample.end, sample.logprobs
        text = _text(sample.detokeniser, ids, end, self.params)
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
        return [
            _completion(index, sample, *self.weights_of(index, len(sample.token_ids)))
            for index, sample in enumerate(self._samples)
        ]


def _text(detokeniser: Detokeniser | None, ids: list[int], end: Finished | None, params: SamplingParams) -> str:
    """Return the text that can be shown after the tokens `ids`, and after `end`, if the sample has ended."""
    if detokeniser is None:
        return ""
    if end is None:
        return detokeniser.push(ids)
    # By default an end token is not shown, whether or not the tokenizer marks it as special.
    shown = ids[:-1] if hides_last_token(end, params) else ids
    return detokeniser.push(shown) + detokeniser.finish(end.cut)


def _completion(
    index: int, sample: _Sample, weight_version: str, weight_spans: list[tuple[str, int]] | None
) -> Completion:
    assert sample.end is not None
    return Completion(
        index=index,
        token_ids=sample.token_ids,
        text="".join(sample.text),
        logprobs=sample.logprobs,
        finish_reason=sample.end.reason,
        stop_reason=sample.end.stop,
        weight_version=weight_version,
        weight_spans=weight_spans,
    )


LOGPROBS_FREED_AT_ONCE = 4096  # each with up to 20 top log-probabilities


class UnstreamedRequest(OpenRequest):
    """A request whose owner is notified of each sample once, when it has ended.

    Until then the sample's tokens are in the token store. If `advance` ends the request, the caller closes it in the
    store, together with all others that the same report ends.
    """

    def __init__(
        self,
        rid: int,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        sink: Sink,
        tokenizer: Tokenizer | None,
        token_store: TokenStore,
    ) -> None:
        super().__init__(rid, request_id, prompt, params, sink)
        self._tokenizer = tokenizer
        self._token_store = token_store
        self._done: list[Completion | None] = [None] * params.n
        self._logprobs: list[list[TokenLogprob]] | None = None
        self.each_token = params.logprobs is not None
        if self.each_token:
            self._logprobs = [[] for _ in range(params.n)]
        token_store.open(rid, params.n)

    def advance(self, streamed: StreamedTokens, ends: Mapping[int, Finished], progress: Progress) -> None:
        if self._logprobs is not None:
            for i in range(*streamed.bounds.get(self.rid, NO_ROWS)):
                logprob = token_logprob(self.params, streamed.tokens[i], streamed.rows[i], progress)
                self._logprobs[streamed.samples[i]].append(logprob)
        if not ends:
            return
        if len(ends) < self._left:  # else the caller closes the whole request in the store
            self._token_store.drop(self.rid, ends)
        for end, ids, text in zip(ends.values(), *streamed.whole[self.rid], strict=True):
            if isinstance(text, Exception):
                raise text
            self._end(end.sample, ids, text, end.reason, end.stop)

    def runs(self, samples: range) -> bool:
        return any(self._done[index] is None for index in samples)

    def restart(self, samples: range) -> bool:
        if any(self._done[index] is not None for index in samples):
            return False
        self._forget_weights(samples)
        for index in samples:
            self._token_store.take(self.rid, index)
            if self._logprobs is not None:
                self._logprobs[index] = []
        if len(samples) == self.params.n:
            self.timings.first_token = None
        return True

    def tokens_so_far(self, index: int) -> int | None:
        return self._token_store.count(self.rid, index) if self._done[index] is None else None

    def abort(self, reason: Ending) -> None:
        for index, done in enumerate(self._done):
            if done is None:
                self._end(index, *self._so_far(index), reason)
        self._token_store.close(self.rid)

    def free(self) -> None:
        super().free()
        for logprobs in self._logprobs or ():
            while logprobs:  # freeing millions at once would hold the GIL for long
                del logprobs[-LOGPROBS_FREED_AT_ONCE:]

    def fail(self, error: TokError) -> None:
        super().fail(error)
        self._token_store.close(self.rid)

    def _so_far(self, index: int) -> tuple[list[int], str]:
        """Return tokens and text of a sample that is aborted."""
        ids = self._token_store.take(self.rid, index)
        if self._logprobs is not None:
            ids = ids[: len(self._logprobs[index])]  # an abort may come after a token and before its log-probability
        skip = self.params.skip_special_tokens
        return ids.tolist(), "" if self._tokenizer is None else self._tokenizer.continuation(ids, None, skip)

    def _end(self, index: int, ids: list[int], text: str, reason: FinishReason, stop: int | str | None = None) -> None:
        logprobs = None if self._logprobs is None else self._logprobs[index]
        self._done[index] = Completion(index, ids, text, logprobs, reason, stop, *self.weights_of(index, len(ids)))
        self.output_tokens += len(ids)
        self._deltas.append(Delta(index, ids, text, logprobs, reason, stop, self.prompt_logprobs()))
        self._count_end(len(ids))

    def _completions(self) -> list[Completion]:
        return [done for done in self._done if done is not None]
