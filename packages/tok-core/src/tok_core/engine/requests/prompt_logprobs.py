"""PromptLogprobs: what the model thinks of a prompt's own tokens, gathered as its chunks come back."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tok_core.messages import Float32, Int32, Scores
from tok_core.outputs import TokenLogprob


class PromptLogprobs:
    """Of a `prompt` of P tokens, with the `top` most likely ones at each. A chunk that comes twice counts once."""

    def __init__(self, prompt: list[int], top: int) -> None:
        self._prompt = prompt
        self._logprob: Float32 = np.zeros(len(prompt), np.float32)
        self._top_token: Int32 = np.zeros((len(prompt), top), np.int32)
        self._top_logprob: Float32 = np.zeros((len(prompt), top), np.float32)
        self._there: NDArray[np.bool_] = np.zeros(len(prompt), np.bool_)
        self._there[0] = True  # nothing is before it
        self._whole: list[TokenLogprob | None] | None = None

    def take(self, scores: Scores) -> None:
        """Some of the tokens."""
        at, top = slice(scores.first, scores.first + len(scores.logprob)), self._top_token.shape[1]
        self._logprob[at] = scores.logprob
        self._top_token[at] = scores.top_token[:, :top]
        self._top_logprob[at] = scores.top_logprob[:, :top]
        self._there[at] = True

    def whole(self) -> list[TokenLogprob | None] | None:
        """One entry a token, None for the first; None as long as any is missing. The same list each time."""
        if self._whole is None and self._there.all():
            tops = zip(self._top_token.tolist(), self._top_logprob.tolist(), strict=True)
            rows = zip(self._prompt, self._logprob.tolist(), tops, strict=True)
            self._whole = [TokenLogprob(token, one, tuple(zip(*top, strict=True))) for token, one, top in rows]
            self._whole[0] = None
        return self._whole
