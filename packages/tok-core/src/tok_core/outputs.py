"""What the engine returns: deltas while a request runs, and the whole output once it has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:  # what is never sent needs no type at run time, and who only asks needs no NumPy
    import numpy as np

Pooling = Literal["last", "mean"]

FinishReason = Literal["stop", "length", "abort", "stop_when"]
Ending = Literal["abort", "stop_when"]
"""Why a request is ended from outside: it is not wanted any more, or what it has is enough."""


# None of these can be part of a cycle; by the million, they need not be looked at for one (gc=False).


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """One token's log-probability under the model's own distribution, and the `top` most likely `(id, logprob)`.

    Under a grammar the distribution is that over the tokens which it allows; where it allows but one text, 0.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Delta(msgspec.Struct, frozen=True, gc=False):
    """What one sample gained. `text` never holds half a character, nor what may yet turn out to be a stop string.

    `finish_reason` is set on the last delta of the sample: "stop" (end id, stop id or stop string, named by
    `stop_reason`; None for the model's own end id), "length", or one of `Ending`. `prompt_logprobs`, where the request
    asks for them, come with the first delta of each sample: see `RequestOutput`.
    """

    index: int
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None


class Completion(msgspec.Struct, gc=False):
    """One finished sample. `token_ids` include the end id; `text` does not show it."""

    index: int
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprob] | None
    finish_reason: FinishReason
    stop_reason: int | str | None = None


class Timings(msgspec.Struct):
    """Seconds on the monotonic clock: submitted, first token received, finished."""

    submitted: float
    first_token: float | None = None
    finished: float | None = None


class RequestOutput(msgspec.Struct):
    """One finished request; `outputs` in order of index. `cached_tokens`: prompt tokens found in the cache.

    `prompt_logprobs`, where the request asks for them: of every token of the prompt given those before it, so that the
    first has none (None).
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[Completion]
    cached_tokens: int
    timings: Timings
    prompt_logprobs: list[TokenLogprob | None] | None = None


class EmbeddingOutput(msgspec.Struct):
    """One prompt's embedding, float32 `[N]` of at most the model's hidden size."""

    prompt_token_ids: list[int]
    embedding: np.ndarray
    cached_tokens: int
