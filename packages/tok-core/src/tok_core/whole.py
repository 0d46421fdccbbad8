"""WholeRequest: a request whose owner is told of each sample once, when it has ended."""

from __future__ import annotations

from collections.abc import Mapping

from tok_core.assembly import OpenRequest, Sink, Told, token_logprob
from tok_core.errors import TokError
from tok_core.ledger import Ledger
from tok_core.messages import Finished, Progress
from tok_core.outputs import Completion, Delta, Ending, FinishReason, TokenLogprob
from tok_core.sampling import SamplingParams
from tok_core.text.tokenizer import Tokenizer


class WholeRequest(OpenRequest):
    """A request whose owner is told of each sample once, when it has ended. Until then its tokens are in the ledger."""

    def __init__(
        self,
        rid: int,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        sink: Sink,
        tokenizer: Tokenizer | None,
        ledger: Ledger,
    ) -> None:
        super().__init__(rid, request_id, prompt, params, sink)
        self._tokenizer = tokenizer
        self._ledger = ledger
        self._done: list[Completion | None] = [None] * params.n
        self._logprobs: list[list[TokenLogprob]] | None = None
        self.each_token = params.logprobs is not None
        if self.each_token:
            self._logprobs = [[] for _ in range(params.n)]
        ledger.open(rid, params.n)

    def advance(self, told: Told, ends: Mapping[int, Finished], progress: Progress) -> None:
        if self._logprobs is not None:
            for i in range(*told.bounds.get(self.rid, (0, 0))):
                one = token_logprob(self.params, told.tokens[i], told.rows[i], progress)
                self._logprobs[told.samples[i]].append(one)
        for end in ends.values():
            self._end(end.sample, end.reason, end.stop, end.cut)

    def runs(self, samples: range) -> bool:
        return any(self._done[index] is None for index in samples)

    def restart(self, samples: range) -> bool:
        if any(self._done[index] is not None for index in samples):
            return False
        for index in samples:
            self._ledger.take(self.rid, index)
            if self._logprobs is not None:
                self._logprobs[index] = []
        if len(samples) == self.params.n:
            self.timings.first_token = None
        return True

    def abort(self, reason: Ending) -> None:
        for index, done in enumerate(self._done):
            if done is None:
                self._end(index, reason)

    def fail(self, error: TokError) -> None:
        super().fail(error)
        self._ledger.close(self.rid)

    def _end(self, index: int, reason: FinishReason, stop: int | str | None = None, cut: int | None = None) -> None:
        ids = self._ledger.take(self.rid, index)
        logprobs = None if self._logprobs is None else self._logprobs[index]
        if logprobs is not None:
            ids = ids[: len(logprobs)]  # an abort may come between the token and its log-probability
        # An end token is never shown, whether or not its tokenizer calls it special.
        shown = ids[:-1] if reason == "stop" and cut is None else ids
        text = "" if self._tokenizer is None else self._tokenizer.continuation(shown, cut)
        done = Completion(index, ids.tolist(), text, logprobs, reason, stop)
        self._done[index] = done
        self.output_tokens += len(done.token_ids)
        self._news.append(Delta(index, done.token_ids, text, logprobs, reason, stop, self.prompt_logprobs()))
        self._count_end()
        if self._left == 0:
            self._ledger.close(self.rid)

    def _completions(self) -> list[Completion]:
        return [done for done in self._done if done is not None]
