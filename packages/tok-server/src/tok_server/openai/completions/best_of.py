"""Implement best_of: generate more than n samples, and return those of the highest log-probability per token."""

from __future__ import annotations

import msgspec

from tok_client.types import CompletionRequest
from tok_core import Completion, InvalidField, RequestOutput, SamplingParams
from tok_server.openai.generation import best_of_params, invalid_field, value_or_none
from tok_server.wire import invalid


def best_of_count(request: CompletionRequest, params: SamplingParams) -> int | None:
    """Return how many samples per prompt are generated if these are more than n, else None. Errors: ApiError 400."""
    best_of, n = value_or_none(request.best_of), params.n
    if best_of is None or best_of == n:
        return None
    if best_of < n:
        raise invalid("best_of", f"best_of is {best_of}; allowed: at least n ({n})")
    if value_or_none(request.stream):
        raise invalid("best_of", f"best_of is {best_of}; allowed with stream=true: n ({n})")
    try:
        best_of_params(params, best_of)
    except InvalidField as error:
        raise invalid_field(error, "best_of") from error
    return best_of


def select_best(output: RequestOutput, count: int) -> RequestOutput:
    """Keep the `count` samples of the highest log-probability per token, best first, with new indices from 0."""
    ranked = sorted(output.outputs, key=lambda one: (-_mean_logprob(one), one.index))
    chosen = [msgspec.structs.replace(one, index=index) for index, one in enumerate(ranked[:count])]
    return msgspec.structs.replace(output, outputs=chosen)


def _mean_logprob(sample: Completion) -> float:
    logprobs = sample.logprobs or []
    return sum(one.logprob for one in logprobs) / max(len(logprobs), 1)
