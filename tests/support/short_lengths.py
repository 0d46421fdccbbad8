"""Requests that teach an engine's length model short samples, so that it over-admits and must preempt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tok_core import SamplingParams

PROMPT = [1]
SHORT = SamplingParams(n=64, max_tokens=64, temperature=0, stop_token_ids=(0,), logit_bias={0: 100.0})
"""64 samples of PROMPT that end with their first token although they may have as many."""


def unsampled(answers: Iterable[Sequence[int]]) -> int:
    """Return a token id that no answer contains. As a stop id it leaves open whether samples run to their limit."""
    drawn = {token for answer in answers for token in answer}
    return next(token for token in range(len(drawn) + 1) if token not in drawn)
