"""Token ids in, token ids out: the requests and answers of vLLM's `/inference/v1/generate` and SGLang's `/generate`.

A server with --enable-rl has both endpoints. A sample that was aborted has the finish reason "abort" and the tokens so
far, so that a client can continue from them. `weight_version` is that of the last token. `weight_spans`, if weights
changed before the last token, are `[[version, index of its first token], …]`. `weight_versions` say the same
for every sample, in the form of vLLM and SGLang.

With `stream`, the answers are server-sent events, of which the last is `[DONE]`. vLLM's chunks hold new tokens;
SGLang's hold all tokens so far.
"""

from __future__ import annotations

from tok_client.types.base import UNSET, JSONObject, Maybe, Wire
from tok_client.types.chat import ChatLogprobs
from tok_client.types.generation import PromptLogprobs, StreamOptions, Usage

WeightSpans = list[tuple[str, int]]
TokenTuple = tuple[float | None, int, str | None]
"""Log-probability (None: of a prompt's first token), id and text (None: not given) of a token."""


class WeightVersionSpan(Wire, frozen=True, kw_only=True):
    """Tokens `start` to `end - 1` of a sample, which weights of one version computed."""

    version: str
    start: int
    end: int


class TokenGenerationRequest(Wire, frozen=True, kw_only=True):
    """Body of `POST /inference/v1/generate`.

    token_ids        the prompt
    sampling_params  fields of `POST /v1/completions` that say how to sample, when to stop and what to report
                     `max_tokens` is by default what the model's length leaves
    request_id       names the request in the answer, and in `POST /abort_requests`
    stream           answer with server-sent events, each a `TokenGeneration`
    """

    token_ids: list[int]
    sampling_params: JSONObject
    request_id: Maybe[str] = UNSET
    model: Maybe[str] = UNSET
    stream: Maybe[bool] = UNSET
    stream_options: Maybe[StreamOptions] = UNSET
    cache_salt: Maybe[str] = UNSET
    priority: Maybe[int] = UNSET


class TokenChoice(Wire, frozen=True, kw_only=True):
    """One sample of `TokenGeneration`. In `logprobs`, tokens have names such as "token_id:42".

    stop_reason  the stop id or stop string that ended the sample; null for the model's own end id

    In a stream, `token_ids` and `logprobs` are those of new tokens; a sample's last chunk has the other fields.
    """

    index: int
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int]
    weight_version: Maybe[str] = UNSET
    weight_spans: Maybe[WeightSpans] = UNSET
    weight_versions: Maybe[list[WeightVersionSpan]] = UNSET


class TokenGeneration(Wire, frozen=True, kw_only=True):
    """Answer of `POST /inference/v1/generate`, or a chunk of it."""

    request_id: str
    choices: list[TokenChoice]
    prompt_logprobs: PromptLogprobs | None = None
    kv_transfer_params: JSONObject | None = None
    usage: Maybe[Usage] = UNSET


class AbortRequests(Wire, frozen=True, kw_only=True):
    """Body of `POST /abort_requests`: ids of requests to `/inference/v1/generate`."""

    request_ids: list[str]


class SGLangRequest(Wire, frozen=True, kw_only=True):
    """Body of `POST /generate`. Batches are lists; then the other fields are lists as well, or one value for all.

    text, input_ids    the prompt or prompts; one of the two fields
    sampling_params    see `SGLangSamplingParams`
    rid                names the request in the answer, and in `POST /abort_request`; in a batch, a text is a prefix
    return_logprob     report log-probabilities
    logprob_start_len  position from which on the prompt's are reported; -1: none
    top_logprobs_num   number of most likely tokens reported at each position
    return_text_in_logprobs  report tokens' texts beside their log-probabilities
    extra_key, cache_salt  requests share cached prefixes only if they have the same
    stream             answer with server-sent events, each an `SGLangGeneration` of one sample so far
    """

    text: Maybe[str | list[str]] = UNSET
    input_ids: Maybe[list[int | list[int]]] = UNSET
    sampling_params: Maybe[JSONObject | list[JSONObject]] = UNSET
    rid: Maybe[str | list[str]] = UNSET
    return_logprob: Maybe[bool | list[bool]] = UNSET
    logprob_start_len: Maybe[int | list[int]] = UNSET
    top_logprobs_num: Maybe[int | list[int]] = UNSET
    return_text_in_logprobs: Maybe[bool] = UNSET
    extra_key: Maybe[str | list[str]] = UNSET
    cache_salt: Maybe[str | list[str]] = UNSET
    stream: Maybe[bool] = UNSET


class SGLangSamplingParams(Wire, frozen=True, kw_only=True):
    """The field `sampling_params` of `SGLangRequest`, with SGLang's names.

    max_new_tokens  lowered where the model's length leaves fewer tokens; null: up to the model's length
    no_stop_trim    what ends a sample is part of its text
    sampling_seed   makes the tokens repeatable
    """

    max_new_tokens: int | None = 128
    min_new_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    sampling_seed: int | None = None
    logit_bias: dict[str, float] | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None


class SGLangFinishReason(Wire, frozen=True, kw_only=True, omit_defaults=True):
    """Why a sample ended: `type` is "stop" (`matched`: a token or a stop string), "length" or "abort"."""

    type: str
    matched: Maybe[int | str] = UNSET
    length: Maybe[int] = UNSET
    message: Maybe[str] = UNSET


class SGLangMetaInfo(Wire, frozen=True, kw_only=True, omit_defaults=True):
    """Part of `SGLangGeneration`. Log-probabilities are there if requested, those of the prompt from a position on.

    finish_reason  null in a stream until the sample has ended
    """

    id: str
    finish_reason: SGLangFinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str
    e2e_latency: float
    weight_spans: Maybe[WeightSpans] = UNSET
    weight_versions: Maybe[list[WeightVersionSpan]] = UNSET
    input_token_logprobs: Maybe[list[TokenTuple]] = UNSET
    output_token_logprobs: Maybe[list[TokenTuple]] = UNSET
    input_top_logprobs: Maybe[list[list[TokenTuple] | None]] = UNSET
    output_top_logprobs: Maybe[list[list[TokenTuple]]] = UNSET


class SGLangGeneration(Wire, frozen=True, kw_only=True):
    """Answer of `POST /generate`, for one sample of one prompt. Of several, the answer is a list, prompt by prompt.

    index  in a stream of several samples: position in that list
    """

    text: str
    output_ids: list[int]
    meta_info: SGLangMetaInfo
    index: Maybe[int] = UNSET
