"""Text completions: the request, and the response, which is also the type of each streamed chunk."""

from __future__ import annotations

from msgspec import field

from tok_client.types.base import UNSET, Maybe, Wire
from tok_client.types.generation import GenerationRequest, PromptLogprobs, StopWhenResult, Usage
from tok_client.types.prompts import Prompts, check_prompts, one_by_one


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """Body of `POST /completions`.

    prompt    text, a list of texts, the token ids of one prompt, or a list of such lists; no mixture
    logprobs  k: each token's log-probability and those of the k most likely ones; 0: the token's own only

    ValueError (when decoding: msgspec.ValidationError): `prompt` mixes kinds, or is empty.
    """

    prompt: Prompts
    logprobs: Maybe[int] = UNSET
    echo: Maybe[bool] = UNSET
    best_of: Maybe[int] = UNSET
    suffix: Maybe[str] = UNSET

    def __post_init__(self) -> None:
        check_prompts("prompt", self.prompt)

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts one by one: each a text, or the ids of its tokens."""
        return one_by_one(self.prompt)


class CompletionLogprobs(Wire, frozen=True, kw_only=True):
    """Log-probabilities (natural, of the model's own distribution) of one choice's tokens, as parallel lists.

    JSON has no −inf, and encoding it would give null. A server sends −9999.0 instead, as OpenAI's does. `text_offset`
    counts characters. The first token of an echoed prompt has no log-probability (None).
    """

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] | None = None
    text_offset: list[int] = field(default_factory=list)


class CompletionChoice(Wire, frozen=True, kw_only=True):
    """One sample of one prompt; `index` is prompt × n + sample.

    `finish_reason` is None until the sample ends, then "stop", "length" or "stop_when". Other servers also send
    "content_filter" and others. If requested, `prompt_token_ids` comes with the first chunk of a streamed choice.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    token_ids: Maybe[list[int]] = UNSET
    prompt_token_ids: Maybe[list[int]] = UNSET
    prompt_logprobs: Maybe[PromptLogprobs] = UNSET


class Completion(Wire, frozen=True, kw_only=True):
    """Response of `POST /completions`; each event of a stream is one of these with the new text.

    `created` is in seconds since 1970. `usage` is null on the chunks before the one that carries it. `stop_when`, if
    requested, comes with the last chunk of a stream.
    """

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Maybe[Usage] = UNSET
    system_fingerprint: Maybe[str] = UNSET
    stop_when: Maybe[StopWhenResult] = UNSET
