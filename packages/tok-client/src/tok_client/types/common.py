"""What completions and chat completions have in common: usage, stream options, sampling extensions."""

from __future__ import annotations

from tok_client.types.base import UNSET, JSONObject, Maybe, Wire
from tok_client.types.stop_when import StopWhen
from tok_client.types.structured import ResponseFormat, StructuredOutputs


class StreamOptions(Wire, frozen=True, kw_only=True):
    """How to stream. `include_usage`: one more chunk at the end, without choices, that carries the usage.

    Beyond OpenAI's reference: `continuous_usage_stats`, where every chunk carries the usage so far.
    """

    include_usage: Maybe[bool] = UNSET
    continuous_usage_stats: Maybe[bool] = UNSET
    include_obfuscation: Maybe[bool] = UNSET


class GenerationRequest(Wire, frozen=True, kw_only=True):
    """The fields that both endpoints share. Ranges are the server's to check; types are checked here.

    Beyond OpenAI's reference: top_k, min_p, repetition_penalty, min_tokens, ignore_eos, stop_token_ids, priority (lower
    is served first), return_token_ids, which adds `token_ids` to each choice of the response; prompt_logprobs, which
    adds the log-probability of each token of the prompt and those of so many most likely ones in its place;
    cache_salt, as requests with different ones share nothing in the prefix cache;
    stop_when, which ends samples that still run once what the finished ones say is enough.

    At most one field says what the text of the answer must be: response_format (for completions beyond the reference),
    structured_outputs, or under their older names guided_json and its like.
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
    cache_salt: Maybe[str] = UNSET
    stop_token_ids: Maybe[list[int]] = UNSET
    return_token_ids: Maybe[bool] = UNSET
    prompt_logprobs: Maybe[int] = UNSET
    response_format: Maybe[ResponseFormat] = UNSET
    structured_outputs: Maybe[StructuredOutputs] = UNSET
    guided_json: Maybe[JSONObject | str] = UNSET
    guided_regex: Maybe[str] = UNSET
    guided_choice: Maybe[list[str]] = UNSET
    guided_grammar: Maybe[str] = UNSET
    guided_json_object: Maybe[bool] = UNSET
    stop_when: Maybe[StopWhen] = UNSET


class PromptLogprob(Wire, frozen=True, kw_only=True):
    """A token in one place of a prompt. `rank`: 1 for the likeliest; None where it is not among those asked for."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""By place, token ids to log-probabilities: the prompt's own token and the most likely ones; None for the first."""


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
