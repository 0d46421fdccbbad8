"""How a `map` goes about its prompts, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from os import PathLike
from typing import Literal, Self, TypedDict

import msgspec

from tok_client.requests import ChatCompletionOptions, CompletionOptions, EmbeddingParams


class MapParams(TypedDict, total=False):
    """What every `map` takes beside the parameters of the wire; see `MapOptions`."""

    concurrency: int
    ordered: bool
    max_retries: int
    on_error: Literal["raise", "return"]
    output: str | PathLike[str] | None
    sync_seconds: float
    progress: bool


class CompletionMapParams(CompletionOptions, MapParams, total=False):
    """What `completions.map` takes."""


class ChatCompletionMapParams(ChatCompletionOptions, MapParams, total=False):
    """What `chat.completions.map` takes."""


class EmbeddingMapParams(EmbeddingParams, MapParams, total=False):
    """What `embeddings.map` takes."""


class MapOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to go about it.

    concurrency   requests open at a time; four times as many prompts are held at most, as far ahead of the one whose
                  result is awaited
    ordered       results in the order of the prompts, not as they come
    max_retries   most retries of a request, of those that may help: see `AsyncClient`
    on_error      what becomes of a prompt that fails: its error is raised in place of its result, which ends the run,
                  or returned in it
    output        a file for the answers, a line each as they come. What it has already, of an earlier run, is neither
                  asked nor returned again. Errors are not written: a further run tries those prompts again.
    sync_seconds  how often what was written is forced to the disk: as much as a power failure may lose. A process that
                  is killed loses nothing.
    progress      a line on stderr tells how far it is

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
        if self.concurrency < 1:
            raise ValueError(f"concurrency is {self.concurrency}; allowed: integers from 1")
        if self.max_retries < 0:
            raise ValueError(f"max_retries is {self.max_retries}; allowed: integers from 0")
        if self.on_error not in ("raise", "return"):
            raise ValueError(f"on_error is {self.on_error!r}; allowed: 'raise', 'return'")
        if not 0 < self.sync_seconds < math.inf:
            raise ValueError(f"sync_seconds is {self.sync_seconds}; allowed: seconds above 0, finite")

    @classmethod
    def split(cls, params: Mapping[str, object]) -> tuple[Self, dict[str, object]]:
        """The options among `params`, and the rest. ValueError: a value is not allowed."""
        own = cls.__struct_fields__
        options = cls(**{name: value for name, value in params.items() if name in own})  # type: ignore[arg-type]
        return options, {name: value for name, value in params.items() if name not in own}
