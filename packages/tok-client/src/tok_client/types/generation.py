"""Types shared by completions and chat completions: sampling parameters, constraints on the text, usage."""

from __future__ import annotations

from typing import ClassVar, Literal

from tok_client.types.base import UNSET, JSONObject, Maybe, Wire


class Distinct(Wire, frozen=True, kw_only=True, tag_field="type", tag="distinct"):
    """The condition that `count` different answers are known.

    `pattern`, here and below, is a regular expression (RE2 syntax) with one group, which is the answer. The last match
    in a sample's text counts; a sample without a match has no answer.
    """

    type: ClassVar[Literal["distinct"]] = "distinct"
    count: int
    pattern: str


class Majority(Wire, frozen=True, kw_only=True, tag_field="type", tag="majority"):
    """The condition that the most frequent answer has won the vote.

    The answer leads the next one by at least `margin`, or by more than the number of samples left.
    """

    type: ClassVar[Literal["majority"]] = "majority"
    margin: int
    pattern: str


class FirstMatch(Wire, frozen=True, kw_only=True, tag_field="type", tag="first_match"):
    """The condition that one sample has an answer."""

    type: ClassVar[Literal["first_match"]] = "first_match"
    pattern: str


StopWhen = Distinct | Majority | FirstMatch


class StopWhenResult(Wire, frozen=True, kw_only=True):
    """The votes of the samples.

    met        whether the condition was met, before or with the last finished sample
    answers    how often finished samples gave each answer, the most frequent first
    finished   samples that ended by themselves, including those that ended just after the condition was met
    unmatched  finished samples without an answer
    cancelled  samples that were ended early, with finish reason "stop_when" and their text so far
    """

    met: bool
    answers: dict[str, int]
    finished: int
    cancelled: int
    unmatched: int


class TextFormat(Wire, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """Any text."""

    type: ClassVar[Literal["text"]] = "text"


class JsonObjectFormat(Wire, frozen=True, kw_only=True, tag_field="type", tag="json_object"):
    """Any JSON object."""

    type: ClassVar[Literal["json_object"]] = "json_object"


class JsonSchema(Wire, frozen=True, kw_only=True):
    """A JSON schema with a name. `strict` requests an answer that always follows it."""

    name: str
    schema: Maybe[JSONObject] = UNSET
    description: Maybe[str] = UNSET
    strict: Maybe[bool] = UNSET


class JsonSchemaFormat(Wire, frozen=True, kw_only=True, tag_field="type", tag="json_schema"):
    """JSON that follows a schema."""

    type: ClassVar[Literal["json_schema"]] = "json_schema"
    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(Wire, frozen=True, kw_only=True):
    """A constraint on the text beyond OpenAI's reference; exactly one field is set.

    json         JSON schema, as an object or as text
    regex        regular expression that the whole text matches
    choice       texts to choose from
    grammar      grammar in EBNF (`name ::= …`), whose `root` is the whole text, or in Lark, whose `start` is
    json_object  any JSON object
    """

    json: Maybe[JSONObject | str] = UNSET
    regex: Maybe[str] = UNSET
    choice: Maybe[list[str]] = UNSET
    grammar: Maybe[str] = UNSET
    json_object: Maybe[bool] = UNSET


class StreamOptions(Wire, frozen=True, kw_only=True):
    """Options of a stream. `include_usage` adds a last chunk without choices that carries the usage.

    Beyond OpenAI's reference: `continuous_usage_stats`, with which every chunk carries the usage so far.
    """

    include_usage: Maybe[bool] = UNSET
    continuous_usage_stats: Maybe[bool] = UNSET
    include_obfuscation: Maybe[bool] = UNSET


class GenerationRequest(Wire, frozen=True, kw_only=True):
    """The fields that both endpoints share. Types are checked here, ranges by the server.

    Beyond OpenAI's reference: top_k, min_p, repetition_penalty, min_tokens, ignore_eos and stop_token_ids, and

    allowed_token_ids  the only tokens that are sampled
    bad_words          strings that are not generated, as the tokenizer writes them with or without a space before them
    include_stop_str_in_output   what ends a sample is part of its text
    skip_special_tokens          false: special tokens are part of the text
    add_special_tokens           whether the tokenizer adds special tokens, such as BOS, to a prompt of text: by default
                                 to a plain prompt, and not to a chat, whose template writes them
    truncate_prompt_tokens       k: only the last k tokens of the prompt are used; -1: as many as the model's length
                                 leaves room for
    priority           lower values are served first
    return_token_ids   adds `token_ids` to each choice of the response, and `prompt_token_ids`
    return_tokens_as_token_ids   log-probabilities name tokens "token_id:42", not by their text
    prompt_logprobs    k: adds the log-probability and rank of each prompt token and of the k most likely tokens at its
                       position
    cache_salt         requests with different values share nothing in the prefix cache
    stop_when          ends the samples still running once the finished ones meet a condition

    At most one field constrains the text of the answer: response_format (for completions beyond the reference),
    structured_outputs, or their older names guided_json and so on.
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
    allowed_token_ids: Maybe[list[int]] = UNSET
    bad_words: Maybe[list[str]] = UNSET
    include_stop_str_in_output: Maybe[bool] = UNSET
    skip_special_tokens: Maybe[bool] = UNSET
    add_special_tokens: Maybe[bool] = UNSET
    truncate_prompt_tokens: Maybe[int] = UNSET
    return_token_ids: Maybe[bool] = UNSET
    return_tokens_as_token_ids: Maybe[bool] = UNSET
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
    """A token at one position of a prompt. `rank` is 1 for the most likely token; None if the server does not say."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""For each position, log-probabilities by token id: the prompt's own token and the most likely ones.

The first position has None.
"""


class PromptTokensDetails(Wire, frozen=True, kw_only=True):
    """The number of the prompt's tokens that were found in the cache."""

    cached_tokens: int | None = 0
    audio_tokens: Maybe[int] = UNSET
    text_tokens: Maybe[int] = UNSET
    image_tokens: Maybe[int] = UNSET
    cache_write_tokens: Maybe[int] = UNSET


class CompletionTokensDetails(Wire, frozen=True, kw_only=True):
    """The numbers of generated tokens of special kinds."""

    reasoning_tokens: Maybe[int] = UNSET
    audio_tokens: Maybe[int] = UNSET
    text_tokens: Maybe[int] = UNSET
    accepted_prediction_tokens: Maybe[int] = UNSET
    rejected_prediction_tokens: Maybe[int] = UNSET


class Usage(Wire, frozen=True, kw_only=True):
    """Tokens of one request: each prompt is counted once, the choices are summed."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: Maybe[PromptTokensDetails] = UNSET
    completion_tokens_details: Maybe[CompletionTokensDetails] = UNSET
