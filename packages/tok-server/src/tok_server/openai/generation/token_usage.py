"""Count token usage: each prompt counts once, however many samples it has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from tok_client.types import PromptTokensDetails, Usage


class HasPrompt(Protocol):
    """A finished or streaming request, as far as its prompt is concerned."""

    @property
    def prompt_token_ids(self) -> list[int]: ...
    @property
    def cached_tokens(self) -> int: ...


def total_usage(requests: Iterable[HasPrompt], completion_tokens: int) -> Usage:
    """Return the usage of one HTTP request, over all its prompts."""
    prompt_tokens = cached_tokens = 0
    for one in requests:
        prompt_tokens += len(one.prompt_token_ids)
        cached_tokens += one.cached_tokens
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
    )


def running_usage(prompts: Iterable[Sequence[int]], completion_tokens: int) -> Usage:
    """Return the usage so far of a streamed answer; cached tokens are reported only at its end."""
    prompt_tokens = sum(map(len, prompts))
    return Usage(
        prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, total_tokens=prompt_tokens + completion_tokens
    )
