"""Usage: prompts counted once each, however many samples are drawn from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from tok_client.types import PromptTokensDetails, Usage


class Prompted(Protocol):
    """What has a prompt: a finished request, or one that streams."""

    @property
    def prompt_token_ids(self) -> list[int]: ...
    @property
    def cached_tokens(self) -> int: ...


def usage(requests: Iterable[Prompted], completion_tokens: int) -> Usage:
    """The usage of all prompts of one HTTP request."""
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
    """The usage so far, while the answer is streamed; what was found in the cache is told at the end."""
    prompt_tokens = sum(map(len, prompts))
    return Usage(
        prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, total_tokens=prompt_tokens + completion_tokens
    )
