"""UnstreamedRequest: a request whose owner receives each sample once, when it has ended."""

from __future__ import annotations

from collections.abc import Mapping

from tok_core.engine.requests.request_state import OpenRequest, Sink, StreamedTokens, token_logprob
from tok_core.engine.token_store import TokenStore
from tok_core.errors import TokError
from tok_core.messages import Finished, Progress
from tok_core.outputs import Completion, Delta, Ending, FinishReason, TokenLogprob
from tok_core.sampling_params import SamplingParams
from tok_core.text import Tokenizer

FREED = 4096  # log-probabilities freed at a time; each may have 20 most likely tokens


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
            for i in range(*streamed.bounds.get(self.rid, (0, 0))):
                one = token_logprob(self.params, streamed.tokens[i], streamed.rows[i], progress)
                self._logprobs[streamed.samples[i]].append(one)
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
        for index in samples:
            self._token_store.take(self.rid, index)
            if self._logprobs is not None:
                self._logprobs[index] = []
        if len(samples) == self.params.n:
            self.timings.first_token = None
        return True

    def abort(self, reason: Ending) -> None:
        for index, done in enumerate(self._done):
            if done is None:
                self._end(index, *self._so_far(index), reason)
        self._token_store.close(self.rid)

    def free(self) -> None:
        for logprobs in self._logprobs or ():
            while logprobs:  # freeing millions at once would hold the GIL for long
                del logprobs[-FREED:]

    def fail(self, error: TokError) -> None:
        super().fail(error)
        self._token_store.close(self.rid)

    def _so_far(self, index: int) -> tuple[list[int], str]:
        """Return tokens and text of a sample that is aborted."""
        ids = self._token_store.take(self.rid, index)
        if self._logprobs is not None:
            ids = ids[: len(self._logprobs[index])]  # an abort may come after a token and before its log-probability
        return ids.tolist(), "" if self._tokenizer is None else self._tokenizer.continuation(ids)

    def _end(self, index: int, ids: list[int], text: str, reason: FinishReason, stop: int | str | None = None) -> None:
        logprobs = None if self._logprobs is None else self._logprobs[index]
        self._done[index] = Completion(index, ids, text, logprobs, reason, stop)
        self.output_tokens += len(ids)
        self._deltas.append(Delta(index, ids, text, logprobs, reason, stop, self.prompt_logprobs()))
        self._count_end()

    def _completions(self) -> list[Completion]:
        return [done for done in self._done if done is not None]
