"""Text completions: the request, and the response that is also the shape of each streamed chunk."""

from __future__ import annotations

from typing import cast

from msgspec import field

from tok_client.types.base import UNSET, Maybe, Wire
from tok_client.types.common import GenerationRequest, Usage


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """Body of `POST /completions`.

    prompt     text, a list of texts, the token ids of one prompt, or a list of such lists; no mixture
    logprobs   k: each token's log-probability and those of the k most likely ones; 0: the token's own only

    ValueError (decoding: msgspec.ValidationError): `prompt` mixes kinds, or holds no prompt.
    """

    prompt: str | list[str | int | list[int]]
    logprobs: Maybe[int] = UNSET
    echo: Maybe[bool] = UNSET
    best_of: Maybe[int] = UNSET
    suffix: Maybe[str] = UNSET

    def __post_init__(self) -> None:
        if isinstance(self.prompt, str):
            return
        kinds = {list if kind is tuple else kind for kind in set(map(type, self.prompt))}
        if len(kinds) > 1:
            named = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise ValueError(f"prompt mixes {named}; allowed: only strings, only integers, or only lists")
        if not kinds:
            raise ValueError("prompt is []; allowed: a text, a list of texts, token ids, lists of token ids")

    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one: each a text, or the ids of its tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        # Of one kind, which the first tells: thousands of ids are not to be looked at one by one.
        prompts = [self.prompt] if isinstance(self.prompt[0], int) else self.prompt
        return cast("list[str | list[int]]", prompts)


class CompletionLogprobs(Wire, frozen=True, kw_only=True):
    """Log-probabilities (natural, of the model's own distribution) of one choice's tokens, list by list.

    JSON has no −inf, and encoding one would give null: a server sends −9999.0 in its place, as OpenAI's does.
    `text_offset` counts characters. Of an echoed prompt the first token has no log-probability (None).
    """

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] | None = None
    text_offset: list[int] = field(default_factory=list)


class CompletionChoice(Wire, frozen=True, kw_only=True):
    """One sample of one prompt; `index` is prompt × n + sample.

    `finish_reason` is "stop" or "length" ("content_filter" and others elsewhere), None while it streams.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    token_ids: Maybe[list[int]] = UNSET


class Completion(Wire, frozen=True, kw_only=True):
    """Response of `POST /completions`; streamed, each event is one of these with what was gained.

    `created` is in seconds since 1970. `usage` is null on the chunks before the one that carries it.
    """

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Maybe[Usage] = UNSET
    system_fingerprint: Maybe[str] = UNSET
