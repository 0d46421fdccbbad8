"""Implement echo: completions begin with their prompt, including its log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from tok_client.types import CompletionLogprobs
from tok_core import TokenLogprob
from tok_server.openai.generation import TextOffsets, TokenTexts, completion_logprobs

T = TypeVar("T")


class EchoedPrompt:
    """One prompt as its choices repeat it: its text and, once the engine has reported them, its log-probabilities.

    top_logprobs  number of top tokens per position; None: no log-probabilities
    """

    def __init__(self, token_ids: Sequence[int], texts: TokenTexts, top_logprobs: int | None) -> None:
        self._shown = texts.own_text(token_ids)
        self.text = b"".join(self._shown).decode(errors="replace")
        self._token_ids = token_ids
        self._texts = texts
        self._top_logprobs = top_logprobs
        self._logprobs: CompletionLogprobs | None = None
        self._offsets = TextOffsets()

    def logprobs(self, entries: Sequence[TokenLogprob | None] | None) -> CompletionLogprobs | None:
        """Return the log-probabilities of the prompt's tokens; the first has none. `entries`: from the engine."""
        if self._top_logprobs is None or entries is None:
            return None
        if self._logprobs is None:  # computed once: the same for all samples
            self._logprobs = self._compute_logprobs(entries, self._top_logprobs)
        return self._logprobs

    def offsets(self) -> TextOffsets:
        """Return a copy of the offsets at the prompt's end. Call `logprobs` first."""
        return self._offsets.copy()

    def _compute_logprobs(self, entries: Sequence[TokenLogprob | None], top_logprobs: int) -> CompletionLogprobs:
        known = [
            TokenLogprob(token, 0.0) if entry is None else TokenLogprob(token, entry.logprob, entry.top[:top_logprobs])
            for token, entry in zip(self._token_ids, entries, strict=True)
        ]
        found = completion_logprobs(known, self._texts, self._offsets, self._shown)
        self._offsets.finish()
        return CompletionLogprobs(
            tokens=found.tokens,
            token_logprobs=_mask_missing(found.token_logprobs, entries),
            top_logprobs=_mask_missing(found.top_logprobs or [], entries),
            text_offset=found.text_offset,
        )


def _mask_missing(values: Sequence[T | None], entries: Sequence[TokenLogprob | None]) -> list[T | None]:
    """Return the values, with None where the engine has no entry."""
    return [None if entry is None else value for value, entry in zip(values, entries, strict=True)]


def concatenate_logprobs(
    prompt: CompletionLogprobs | None, sample: CompletionLogprobs | None
) -> CompletionLogprobs | None:
    """Return the prompt's log-probabilities followed by a sample's."""
    if prompt is None:
        return sample
    if sample is None:  # nothing to append: the prompt's lists are copied, as other choices share them
        sample = CompletionLogprobs(top_logprobs=[])
    return CompletionLogprobs(
        tokens=prompt.tokens + sample.tokens,
        token_logprobs=prompt.token_logprobs + sample.token_logprobs,
        top_logprobs=[*(prompt.top_logprobs or ()), *(sample.top_logprobs or ())],
        text_offset=prompt.text_offset + sample.text_offset,
    )
