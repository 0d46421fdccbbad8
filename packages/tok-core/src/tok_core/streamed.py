"""StreamedRequest: a request whose owner is told of each token as it comes."""

from __future__ import annotations

import time
from collections.abc import Mapping

from tok_core.assembly import OpenRequest, Sink, Told, token_logprob
from tok_core.messages import Finished, Progress
from tok_core.outputs import Completion, Delta, FinishReason, TokenLogprob
from tok_core.sampling import SamplingParams
from tok_core.text.detokenise import Detokeniser
from tok_core.text.tokenizer import Tokenizer


class _Sample:
    """What one sample has so far."""

    __slots__ = ("detokeniser", "finish_reason", "logprobs", "stop_reason", "text", "token_ids")

    def __init__(self, detokeniser: Detokeniser | None, logprobs: bool) -> None:
        self.detokeniser = detokeniser
        self.token_ids: list[int] = []
        self.text: list[str] = []
        self.logprobs: list[TokenLogprob] | None = [] if logprobs else None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None


class StreamedRequest(OpenRequest):
    """A request whose owner is told of each token as it comes."""

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

    def advance(self, told: Told, ends: Mapping[int, Finished], progress: Progress) -> None:
        if self.timings.first_token is None:
            self.timings.first_token = time.monotonic()
        for i in range(*told.bounds.get(self.rid, (0, 0))):
            index, token = told.samples[i], told.tokens[i]
            sample = self._samples[index]
            logprobs = None
            if sample.logprobs is not None:
                logprobs = [token_logprob(self.params, token, told.rows[i], progress)]
                sample.logprobs += logprobs
            self._news.append(self._delta(index, sample, token, logprobs, ends.get(index)))

    def runs(self, samples: range) -> bool:
        return any(self._samples[index].finish_reason is None for index in samples)

    def restart(self, samples: range) -> bool:
        return not any(self._samples[index].token_ids for index in samples)

    def abort(self) -> None:
        for index, sample in enumerate(self._samples):
            if sample.finish_reason is None:
                text = sample.detokeniser.finish() if sample.detokeniser is not None else ""
                sample.text.append(text)
                self._finish(sample, "abort", None)
                self._news.append(Delta(index, [], text, None, "abort"))

    def _delta(
        self, index: int, sample: _Sample, token: int, logprobs: list[TokenLogprob] | None, end: Finished | None
    ) -> Delta:
        """One token of a sample, and how it ended the sample if it did."""
        sample.token_ids.append(token)
        if end is not None:
            text = _last_text(sample.detokeniser, token, end)
            self._finish(sample, end.reason, end.stop)
        else:
            text = "" if sample.detokeniser is None else sample.detokeniser.push_one(token)
        sample.text.append(text)
        return Delta(index, [token], text, logprobs, sample.finish_reason, sample.stop_reason)

    def _finish(self, sample: _Sample, reason: FinishReason, stop: int | str | None) -> None:
        sample.finish_reason, sample.stop_reason = reason, stop
        sample.detokeniser = None
        self._count_end()

    def _completions(self) -> list[Completion]:
        return [_completion(index, sample) for index, sample in enumerate(self._samples)]


def _last_text(detokeniser: Detokeniser | None, token: int, end: Finished) -> str:
    if detokeniser is None:
        return ""
    # An end token is never shown, whether or not its tokenizer calls it special.
    ended_by_token = end.reason == "stop" and end.cut is None
    return ("" if ended_by_token else detokeniser.push_one(token)) + detokeniser.finish(end.cut)


def _completion(index: int, sample: _Sample) -> Completion:
    assert sample.finish_reason is not None
    return Completion(
        index=index,
        token_ids=sample.token_ids,
        text="".join(sample.text),
        logprobs=sample.logprobs,
        finish_reason=sample.finish_reason,
        stop_reason=sample.stop_reason,
    )
