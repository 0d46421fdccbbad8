"""The result of one prompt."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

P_co = TypeVar("P_co", covariant=True)
T_co = TypeVar("T_co", covariant=True)


class MapResult(msgspec.Struct, Generic[P_co, T_co], frozen=True, kw_only=True):
    """A prompt, its number in the input (from 0), its key if the run has keys, and its answer or its error.

    `error` is a TokError, or the ValueError or TypeError of a prompt that cannot be sent.
    """

    index: int
    prompt: P_co
    key: str | None = None
    answer: T_co | None = None
    error: Exception | None = None

    def result(self) -> T_co:
        """Return the answer; raise the error if there is none."""
        if self.answer is None:
            raise self.error or ValueError("the result has neither an answer nor an error")
        return self.answer
