"""Implement echo: completions begin with their prompt, including its log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from tok_client.types import CompletionLogprobs
from tok_core import TokenLogprob
from tok_server.openai.generation import GenerationJob, TextOffsets, TokenTexts, completion_logprobs
from tok_server.wire import invalid

T = TypeVar("T")

MAX_ECHO_TOKENS = 1 << 24  # prompt tokens, and top tokens reported beside them, repeated in all choices together


def check_echo_size(job: GenerationJob) -> None:
    """Raise ApiError (400) if the choices would repeat more of their prompts than fits into memory."""
    entries_per_token = (1 + (0 if job.params.logprobs is None else 1 + job.params.logprobs)) if job.echo else 0
    entries_per_token += 0 if job.prompt_logprobs is None else 1 + job.prompt_logprobs
    tokens, n = sum(map(len, job.prompts)), job.params.n
    if n * tokens * entries_per_token > MAX_ECHO_TOKENS:
        name = "n" if n > 1 else "echo" if job.echo else "prompt_logprobs"
        what = "n × prompt tokens × values that echo and prompt_logprobs report per token"
        message = f"{name}: {what} is {n} × {tokens} × {entries_per_token}; allowed: at most {MAX_ECHO_TOKENS} in all"
        raise invalid(name, message)


class EchoedPrompt:
    """One prompt as its choices repeat it: its text and, once the engine has reported them, its log-probabilities.

    top_logprobs  number of top tokens per position; None: no log-probabilities
    """

    def __init__(self, token_ids: Sequence[int], texts: TokenTexts, top_logprobs: int | None) -> None:
        self.text = texts.tokenizer.decode(token_ids) if texts.tokenizer else ""
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
        found = completion_logprobs(known, self._texts, self._offsets)
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
