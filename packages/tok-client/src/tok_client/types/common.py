"""What completions and chat completions have in common: usage, stream options, sampling extensions."""

from __future__ import annotations

from tok_client.types.base import UNSET, Maybe, Wire


class StreamOptions(Wire, frozen=True, kw_only=True):
    """How to stream. `include_usage`: one more chunk at the end, without choices, that carries the usage."""

    include_usage: Maybe[bool] = UNSET
    include_obfuscation: Maybe[bool] = UNSET


class GenerationRequest(Wire, frozen=True, kw_only=True):
    """The fields that both endpoints share. Ranges are the server's to check; types are checked here.

    Beyond OpenAI's reference: top_k, min_p, repetition_penalty, min_tokens, ignore_eos, stop_token_ids, priority (lower
    is served first), and return_token_ids, which adds `token_ids` to each choice of the response.
    """

    model: Maybe[str] = UNSET
    max_tokens: Maybe[int] = UNSET
    temperature: Maybe[float] = UNSET
    top_p: Maybe[float] = UNSET
    n: Maybe[int] = UNSET
    stream: Maybe[bool] = UNSET
    stream_options: Maybe[StreamOptions] = UNSET
    stop: Maybe[str | list[str]] = UNSET
    presence_penalty: Maybe[float] = UNSET
    frequency_penalty: Maybe[float] = UNSET
    logit_bias: Maybe[dict[str, float]] = UNSET
    user: Maybe[str] = UNSET
    seed: Maybe[int] = UNSET
    top_k: Maybe[int] = UNSET
    min_p: Maybe[float] = UNSET
    repetition_penalty: Maybe[float] = UNSET
    min_tokens: Maybe[int] = UNSET
    ignore_eos: Maybe[bool] = UNSET
    priority: Maybe[int] = UNSET
    stop_token_ids: Maybe[list[int]] = UNSET
    return_token_ids: Maybe[bool] = UNSET


class PromptTokensDetails(Wire, frozen=True, kw_only=True):
    """Of the prompt's tokens, how many were found in the cache."""

    cached_tokens: int | None = 0
    audio_tokens: Maybe[int] = UNSET
    text_tokens: Maybe[int] = UNSET
    image_tokens: Maybe[int] = UNSET
    cache_write_tokens: Maybe[int] = UNSET


class CompletionTokensDetails(Wire, frozen=True, kw_only=True):
    """Of the generated tokens, how many were of a special kind."""

    reasoning_tokens: Maybe[int] = UNSET
    audio_tokens: Maybe[int] = UNSET
    text_tokens: Maybe[int] = UNSET
    accepted_prediction_tokens: Maybe[int] = UNSET
    rejected_prediction_tokens: Maybe[int] = UNSET


class Usage(Wire, frozen=True, kw_only=True):
    """Tokens of one request: its prompts counted once each, its choices summed."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: Maybe[PromptTokensDetails] = UNSET
    completion_tokens_details: Maybe[CompletionTokensDetails] = UNSET
