"""OpenRequest: puts together the tokens, texts and log-probabilities of one request as they are reported."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from tok_core.errors import TokError
from tok_core.messages import Finished
from tok_core.outputs import Completion, Delta, FinishReason, RequestOutput, Timings, TokenLogprob
from tok_core.sampling import SamplingParams
from tok_core.text.detokenise import Detokeniser
from tok_core.text.tokenizer import Tokenizer

Sink = Callable[["OpenRequest", list[Delta]], None]


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


class OpenRequest:
    """One request from submission to its last token. `sink` is called, on the reporting thread, with what is new.

    `error` is set where the engine could not go on.
    """

    def __init__(
        self,
        rid: int,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        sink: Sink,
    ) -> None:
        self.rid = rid
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.sink = sink
        self.cached_tokens = 0
        self.timings = Timings(submitted=time.monotonic())
        self.error: TokError | None = None
        self.lock = threading.RLock()  # held while it changes and its sink is told
        self._left = params.n
        wants = params.logprobs is not None
        self._samples = [
            _Sample(None if tokenizer is None else Detokeniser(tokenizer, params.stop), wants) for _ in range(params.n)
        ]

    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self._left == 0 or self.error is not None

    def token(self, index: int, token: int, logprob: TokenLogprob | None, finished: Finished | None) -> Delta:
        """One token of sample `index`, and how it ended the sample if it did."""
        if self.timings.first_token is None:
            self.timings.first_token = time.monotonic()
        sample = self._samples[index]
        sample.token_ids.append(token)
        if sample.logprobs is not None and logprob is not None:
            sample.logprobs.append(logprob)
        text = self._text(sample, token, finished)
        sample.text.append(text)
        if finished is not None:
            self._finish(sample, finished.reason, finished.stop)
        return Delta(
            index=index,
            token_ids=[token],
            text=text,
            logprobs=None if sample.logprobs is None or logprob is None else [logprob],
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
        )

    def abort(self) -> list[Delta]:
        """Ends every sample that still runs with reason "abort"; what was withheld of its text is released."""
        deltas = []
        for index, sample in enumerate(self._samples):
            if sample.finish_reason is None:
                text = sample.detokeniser.finish() if sample.detokeniser is not None else ""
                sample.text.append(text)
                self._finish(sample, "abort", None)
                deltas.append(Delta(index, [], text, None, "abort"))
        return deltas

    def output(self) -> RequestOutput:
        """The whole request, once it is done without error."""
        return RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=self.prompt,
            outputs=[self._completion(index, sample) for index, sample in enumerate(self._samples)],
            cached_tokens=self.cached_tokens,
            timings=self.timings,
        )

    def _text(self, sample: _Sample, token: int, finished: Finished | None) -> str:
        if sample.detokeniser is None:
            return ""
        # An end token is never shown, whether or not its tokenizer calls it special.
        ended_by_token = finished is not None and finished.reason == "stop" and finished.cut is None
        text = "" if ended_by_token else sample.detokeniser.push([token])
        return text if finished is None else text + sample.detokeniser.finish(finished.cut)

    def _finish(self, sample: _Sample, reason: FinishReason, stop: int | str | None) -> None:
        sample.finish_reason, sample.stop_reason = reason, stop
        sample.detokeniser = None
        if self._left == 1:
            self.timings.finished = time.monotonic()
        self._left -= 1

    def _completion(self, index: int, sample: _Sample) -> Completion:
        assert sample.finish_reason is not None
        return Completion(
            index=index,
            token_ids=sample.token_ids,
            text="".join(sample.text),
            logprobs=sample.logprobs,
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
        )


def token_logprob(
    params: SamplingParams, token: int, logprob: float, top_token: np.ndarray, top_logprob: np.ndarray
) -> TokenLogprob | None:
    """The token's log-probability, if the request asked for it, with as many most likely ones as it asked for."""
    if params.logprobs is None:
        return None
    count = params.logprobs
    top = zip(top_token[:count].tolist(), top_logprob[:count].tolist(), strict=True)
    return TokenLogprob(token, logprob, tuple(top))
