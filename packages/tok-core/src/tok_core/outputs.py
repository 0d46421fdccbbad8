"""Result types of the engine: deltas while a request runs, and the whole output once it has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:  # msgspec never decodes EmbeddingOutput, so importers of this module need not load NumPy
    import numpy as np

Pooling = Literal["last", "mean"]

FinishReason = Literal["stop", "length", "abort", "stop_when"]
Ending = Literal["abort", "stop_when"]
"""Reason for which a request is ended from outside: it is aborted, or its caller's stop rule is met."""


DEFAULT_WEIGHT_VERSION = "default"
"""Version of the weights until they are updated."""

# gc=False below: the objects cannot be part of a reference cycle, and a collector would scan millions of them.


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """One token's log-probability under the model's own distribution, and the `top` most likely `(id, logprob)`.

    Under a grammar or `allowed_token_ids` the distribution covers only the tokens allowed. Tokens that the grammar
    determines and that no step sampled have log-probability 0.

    rank  of a prompt's token: the number of tokens that are at least as likely; 1 for the most likely one
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None


class Delta(msgspec.Struct, frozen=True, gc=False):
    """New tokens and text of one sample.

    text             holds whole characters only, and nothing that may become part of a stop string
    finish_reason    set on the last delta of the sample: "stop" (end id, stop id or stop string), "length", or one of
                     `Ending`
    stop_reason      the stop id or stop string that ended the sample; None for the model's own end id
    prompt_logprobs  on the first delta of each sample, if the request asks for them: see `RequestOutput`
    """

    index: int
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None


class Completion(msgspec.Struct, gc=False):
    """One finished sample. `token_ids` include the end id; `text` leaves it out by default.

    weight_version  version of the weights that computed the last token
    weight_spans    if weights changed before the last token: `[(version, index of its first token), …]`; else None
    """

    index: int
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprob] | None
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    weight_version: str = DEFAULT_WEIGHT_VERSION
    weight_spans: list[tuple[str, int]] | None = None


class Timings(msgspec.Struct):
    """Times of a request, in seconds of the monotonic clock; None until then.

    submitted    the engine received it
    first_token  its first token came
    finished     its last sample ended
    started      its first sample left the queue: it got a slot
    """

    submitted: float
    first_token: float | None = None
    finished: float | None = None
    started: float | None = None


class RequestOutput(msgspec.Struct):
    """One finished request.

    outputs          its samples, in order of index
    cached_tokens    number of prompt tokens found in the prefix cache
    prompt_logprobs  if the request asks for them: log-probability of each prompt token given those before it. The first
                     entry is None, since no token precedes it
    weight_version   version of the weights that were in use when the request ended
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[Completion]
    cached_tokens: int
    timings: Timings
    prompt_logprobs: list[TokenLogprob | None] | None = None
    weight_version: str = DEFAULT_WEIGHT_VERSION


class EmbeddingOutput(msgspec.Struct):
    """The embedding of one prompt, float32 `[N]`, where N is at most the model's hidden size."""

    prompt_token_ids: list[int]
    embedding: np.ndarray
    cached_tokens: int
