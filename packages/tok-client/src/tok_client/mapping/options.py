"""Options of a `map`, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from os import PathLike
from typing import Literal, Self, TypedDict

import msgspec

from tok_client.requests import ChatCompletionOptions, CompletionOptions, EmbeddingParams


class MapParams(TypedDict, total=False):
    """Keyword parameters of every `map` beside those of the API; see `MapOptions`."""

    concurrency: int
    ordered: bool
    max_retries: int
    on_error: Literal["raise", "return"]
    output: str | PathLike[str] | None
    sync_seconds: float
    progress: bool


class CompletionMapParams(CompletionOptions, MapParams, total=False):
    """Parameters of `completions.map`."""


class ChatCompletionMapParams(ChatCompletionOptions, MapParams, total=False):
    """Parameters of `chat.completions.map`."""


class EmbeddingMapParams(EmbeddingParams, MapParams, total=False):
    """Parameters of `embeddings.map`."""


class MapOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a `map`.

    concurrency   requests open at a time. At most four times as many prompts are held, counted from the one whose
                  result is awaited
    ordered       return results in the order of the prompts rather than in the order of completion
    max_retries   upper bound on the retries of a request; see `AsyncClient` for the errors that are retried
    on_error      "raise" raises a failed prompt's error in place of its result and ends the run; "return" puts it into
                  the result
    output        file for the answers, one line each, in the order of completion. Prompts that an earlier run has
                  answered there are neither sent nor returned again. Errors are not written, so a further run retries
                  those prompts
    sync_seconds  seconds between fsync calls: a power failure loses at most the answers of this time. A killed process
                  loses nothing
    progress      show progress in a line on stderr

    ValueError: a value is not allowed.
    """

    concurrency: int = 256
    ordered: bool = True
    max_retries: int = 8
    on_error: Literal["raise", "return"] = "raise"
    output: str | PathLike[str] | None = None
    sync_seconds: float = 5.0
    progress: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.concurrency, int) or self.concurrency < 1:
            raise ValueError(f"concurrency is {self.concurrency!r}; allowed: integers from 1")
        if not isinstance(self.max_retries, int) or self.max_retries < 0:
            raise ValueError(f"max_retries is {self.max_retries!r}; allowed: integers from 0")
        if self.on_error not in ("raise", "return"):
            raise ValueError(f"on_error is {self.on_error!r}; allowed: 'raise', 'return'")
        if not isinstance(self.sync_seconds, int | float) or not 0 < self.sync_seconds < math.inf:
            raise ValueError(f"sync_seconds is {self.sync_seconds!r}; allowed: seconds above 0, finite")

    @classmethod
    def split(cls, params: Mapping[str, object]) -> tuple[Self, dict[str, object]]:
        """Return the options among `params`, and the remaining parameters. ValueError: a value is not allowed."""
        own = cls.__struct_fields__
        options = cls(**{name: value for name, value in params.items() if name in own})  # type: ignore[arg-type]
        return options, {name: value for name, value in params.items() if name not in own}
