"""Implement echo: completions begin with their prompt, including its log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from tok_client.types import CompletionLogprobs
from tok_core import TokenLogprob
from tok_server.openai.generation import Job, Offsets, TokenTexts, completion_logprobs
from tok_server.wire import invalid

T = TypeVar("T")

MAX_ECHO_TOKENS = 1 << 24  # prompt tokens, and top tokens reported beside them, repeated in all choices together


def check_repeated(job: Job) -> None:
    """Raise ApiError (400) if the choices would repeat more of their prompts than fits into memory."""
    each = (1 + (0 if job.params.logprobs is None else 1 + job.params.logprobs)) if job.echo else 0
    each += 0 if job.prompt_logprobs is None else 1 + job.prompt_logprobs
    tokens, n = sum(map(len, job.prompts)), job.params.n
    if n * tokens * each > MAX_ECHO_TOKENS:
        name = "n" if n > 1 else "echo" if job.echo else "prompt_logprobs"
        what = "n × prompt tokens × what echo and prompt_logprobs tell of each"
        message = f"{name}: {what} is {n} × {tokens} × {each}; allowed: at most {MAX_ECHO_TOKENS} in all"
        raise invalid(name, message)


class EchoedPrompt:
    """One prompt as its choices repeat it: its text and, once the engine has reported them, its log-probabilities.

    most  number of top tokens per position; None: no log-probabilities
    """

    def __init__(self, token_ids: Sequence[int], texts: TokenTexts, most: int | None) -> None:
        self.text = texts.tokenizer.decode(token_ids) if texts.tokenizer else ""
        self._token_ids = token_ids
        self._texts = texts
        self._most = most
        self._logprobs: CompletionLogprobs | None = None
        self._offsets = Offsets()

    def logprobs(self, entries: Sequence[TokenLogprob | None] | None) -> CompletionLogprobs | None:
        """Return the log-probabilities of the prompt's tokens; the first has none. `entries`: from the engine."""
        if self._most is None or entries is None:
            return None
        if self._logprobs is None:  # computed once: the same for all samples
            self._logprobs = self._written(entries, self._most)
        return self._logprobs

    def offsets(self) -> Offsets:
        """Return a copy of the offsets at the prompt's end. Call `logprobs` first."""
        return self._offsets.copy()

    def _written(self, entries: Sequence[TokenLogprob | None], most: int) -> CompletionLogprobs:
        known = [
            TokenLogprob(token, 0.0) if entry is None else TokenLogprob(token, entry.logprob, entry.top[:most])
            for token, entry in zip(self._token_ids, entries, strict=True)
        ]
        found = completion_logprobs(known, self._texts, self._offsets)
        return CompletionLogprobs(
            tokens=found.tokens,
            token_logprobs=_known(found.token_logprobs, entries),
            top_logprobs=_known(found.top_logprobs or [], entries),
            text_offset=found.text_offset,
        )


def _known(values: Sequence[T | None], entries: Sequence[TokenLogprob | None]) -> list[T | None]:
    """Return the values, with None where the engine has no entry."""
    return [None if entry is None else value for value, entry in zip(values, entries, strict=True)]


def both(prompt: CompletionLogprobs | None, sample: CompletionLogprobs | None) -> CompletionLogprobs | None:
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
