"""PromptLogprobs: collect the log-probabilities of a prompt's tokens as its prefill chunks return."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tok_core.messages import Float32, Int32, Scores
from tok_core.outputs import TokenLogprob


class PromptLogprobs:
    """Log-probabilities of a `prompt`'s tokens, with the `top` most likely ones at each. Chunks may arrive twice."""

    def __init__(self, prompt: list[int], top: int) -> None:
        self._prompt = prompt
        self._logprob: Float32 = np.zeros(len(prompt), np.float32)
        self._top_token: Int32 = np.zeros((len(prompt), top), np.int32)
        self._top_logprob: Float32 = np.zeros((len(prompt), top), np.float32)
        self._there: NDArray[np.bool_] = np.zeros(len(prompt), np.bool_)
        self._there[0] = True  # the first token has no log-probability, since no token precedes it
        self._whole: list[TokenLogprob | None] | None = None

    def take(self, scores: Scores) -> None:
        """Store the scores of one chunk."""
        at, top = slice(scores.first, scores.first + len(scores.logprob)), self._top_token.shape[1]
        self._logprob[at] = scores.logprob
        self._top_token[at] = scores.top_token[:, :top]
        self._top_logprob[at] = scores.top_logprob[:, :top]
        self._there[at] = True

    def whole(self) -> list[TokenLogprob | None] | None:
        """Return one entry per token, the first being None; return None while any is missing. The list is cached."""
        if self._whole is None and self._there.all():
            tops = zip(self._top_token.tolist(), self._top_logprob.tolist(), strict=True)
            rows = zip(self._prompt, self._logprob.tolist(), tops, strict=True)
            self._whole = [TokenLogprob(token, one, tuple(zip(*top, strict=True))) for token, one, top in rows]
            self._whole[0] = None
        return self._whole
