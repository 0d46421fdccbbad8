"""Text completions: the request, and the response that is also the shape of each streamed chunk."""

from __future__ import annotations

from msgspec import field

from tok_client.types.base import UNSET, Maybe, Wire
from tok_client.types.common import GenerationRequest, PromptLogprobs, Usage
from tok_client.types.prompts import Prompts, check_prompts, one_by_one
from tok_client.types.stop_when import StopWhenResult


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """Body of `POST /completions`.

    prompt     text, a list of texts, the token ids of one prompt, or a list of such lists; no mixture
    logprobs   k: each token's log-probability and those of the k most likely ones; 0: the token's own only

    ValueError (decoding: msgspec.ValidationError): `prompt` mixes kinds, or holds no prompt.
    """

    prompt: Prompts
    logprobs: Maybe[int] = UNSET
    echo: Maybe[bool] = UNSET
    best_of: Maybe[int] = UNSET
    suffix: Maybe[str] = UNSET

    def __post_init__(self) -> None:
        check_prompts("prompt", self.prompt)

    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one: each a text, or the ids of its tokens."""
        return one_by_one(self.prompt)


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

    `finish_reason` is "stop", "length" or "stop_when" ("content_filter" and others elsewhere), None while it streams.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    token_ids: Maybe[list[int]] = UNSET
    prompt_logprobs: Maybe[PromptLogprobs] = UNSET


class Completion(Wire, frozen=True, kw_only=True):
    """Response of `POST /completions`; streamed, each event is one of these with what was gained.

    `created` is in seconds since 1970. `usage` is null on the chunks before the one that carries it.
    `stop_when`, where it is asked for, comes with the last chunk of a stream.
    """

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Maybe[Usage] = UNSET
    system_fingerprint: Maybe[str] = UNSET
    stop_when: Maybe[StopWhenResult] = UNSET
