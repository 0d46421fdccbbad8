"""StreamedRequest: a request whose owner is told of each token as it comes."""

from __future__ import annotations

import time
from collections.abc import Mapping

from tok_core.assembly import OpenRequest, Sink, Told, token_logprob
from tok_core.messages import Finished, Progress
from tok_core.outputs import Completion, Delta, Ending, FinishReason, TokenLogprob
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
        own = range(*told.bounds.get(self.rid, (0, 0)))
        if own and self.timings.first_token is None:
            self.timings.first_token = time.monotonic()
        self.output_tokens += len(own)
        for i in own:
            index, token = told.samples[i], told.tokens[i]
            sample = self._samples[index]
            logprobs = None
            if sample.logprobs is not None:
                logprobs = [token_logprob(self.params, token, told.rows[i], progress)]
                sample.logprobs += logprobs
            self._news.append(self._delta(index, sample, token, logprobs, ends.get(index)))
        for end in ends.values():
            if self._samples[end.sample].finish_reason is None:  # without a token
                text = self._release(self._samples[end.sample])
                self._finish(self._samples[end.sample], end.reason, end.stop)
                self._news.append(Delta(end.sample, [], text, None, end.reason, end.stop, self.prompt_logprobs()))

    def runs(self, samples: range) -> bool:
        return any(self._samples[index].finish_reason is None for index in samples)

    def restart(self, samples: range) -> bool:
        return not any(self._samples[index].token_ids for index in samples)

    def abort(self, reason: Ending) -> None:
        for index, sample in enumerate(self._samples):
            if sample.finish_reason is None:
                text = self._release(sample)
                self._finish(sample, reason, None)
                self._news.append(Delta(index, [], text, None, reason))

    def _delta(
        self, index: int, sample: _Sample, token: int, logprobs: list[TokenLogprob] | None, end: Finished | None
    ) -> Delta:
        """One token of a sample, and how it ended the sample if it did."""
        prompt_logprobs = None if sample.token_ids else self.prompt_logprobs()
        sample.token_ids.append(token)
        if end is not None:
            text = _last_text(sample.detokeniser, token, end)
            self._finish(sample, end.reason, end.stop)
        else:
            text = "" if sample.detokeniser is None else sample.detokeniser.push_one(token)
        sample.text.append(text)
        return Delta(index, [token], text, logprobs, sample.finish_reason, sample.stop_reason, prompt_logprobs)

    def _release(self, sample: _Sample) -> str:
        """What was withheld of its text, where it ends without another token."""
        text = "" if sample.detokeniser is None else sample.detokeniser.finish()
        sample.text.append(text)
        return text

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
