"""SamplingParams: how the tokens of one request are sampled and when its samples end."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import copy
from typing import Final, Literal, NamedTuple, get_args

import msgspec

from tok_core.errors import Amount, InvalidField

Kind = Literal["json_object", "json_schema", "regex", "choice", "ebnf", "lark"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

MAX_GRAMMAR_CHARS = 256 * 1024
MAX_WRAPPER_CHARS = 4096
MAX_N = 16_384
MAX_PRIORITY = 1 << 41  # of either sign; wide enough for a server's own classes beside its clients' priorities
MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 100
MAX_STOP_IDS = 64
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 4096
MAX_BIASES = 512
MAX_BAD_WORDS = 128
MAX_BAD_WORD_LENGTH = 256  # characters
INT63 = (1 << 63) - 1


class Grammar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A grammar that the whole text of a sample has to match.

    The constructor checks kind and sizes (`InvalidField`). The engine checks the rest before it serves a request with
    this grammar.

    kind    the form of `value`:
            "json_object"  empty: the text is any JSON object
            "json_schema"  a JSON Schema, as JSON (`tok_core.grammar.json_schema.schema` lists the keywords)
            "regex"        a regular expression that the whole text matches (`tok_core.grammar.regex.parser`)
            "choice"       a JSON array of texts; the text is one of them
            "ebnf"         rules of the form `name ::= …`; `root` derives the whole text (xgrammar's dialect)
            "lark"         rules of the form `name: …`; `start` derives the whole text (what xgrammar takes of Lark)
    prefix  literal text before the match, part of the sample's text
    suffix  literal text after the match, likewise
    """

    kind: Kind
    value: str = ""
    prefix: str = ""
    suffix: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidField("grammar.kind", self.kind, ", ".join(KINDS))
        _text("grammar", self.value, MAX_GRAMMAR_CHARS)
        _text("grammar.prefix", self.prefix, MAX_WRAPPER_CHARS)
        _text("grammar.suffix", self.suffix, MAX_WRAPPER_CHARS)
        if self.kind == "json_object" and self.value:
            raise InvalidField("grammar", self.value, 'an empty text for the kind "json_object"')


def _text(field: str, value: object, max_chars: int) -> None:
    if type(value) is not str:  # a subclass cannot be sent to the manager
        raise InvalidField(field, value, "text")
    if len(value) > max_chars:
        raise InvalidField(field, Amount(f"{len(value)} characters"), f"at most {max_chars}")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise InvalidField(field, value, "valid Unicode, without lone surrogates")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters and stop conditions of one request. Checked when constructed (`InvalidField`).

    n                   number of samples of the prompt; they share its prefill
    max_tokens          maximum number of tokens of each sample; None: up to the model's length; 0: only compute the
                        prompt
    min_tokens          end ids, stop ids and stop strings have no effect before this number of tokens
    temperature         0: always the most likely token
    top_k, top_p, min_p filters of the distribution; 0, 1 and 0 switch them off
    presence_penalty, frequency_penalty   subtracted from logits of tokens already generated, as in OpenAI's reference
    repetition_penalty  divides positive and multiplies negative logits of tokens in prompt or output (CTRL)
    logit_bias          token id -> value added to its logit
    allowed_token_ids   the only tokens that are sampled; `logprobs` are taken over them. None: all tokens
    bad_words           strings that are not generated as the tokenizer writes them, with or without a space before
                        them: the last token is not sampled where the tokens before it have been generated
    seed                makes the tokens repeatable; None: a new random seed for each request
    stop                strings that end a sample; they are not part of its text
    include_stop_str_in_output   what ends a sample, a stop string or a token, is part of its text
    skip_special_tokens   special tokens are not part of the text
    truncate_prompt_tokens   keep only so many of the prompt's last tokens; -1: as many as the model's length allows.
                             Of a text, the tokens that encoding adds at its beginning are kept, too, and count
    stop_token_ids      ids that end a sample, in addition to the model's own end ids
    ignore_eos          the model's own end ids do not end a sample
    priority            requests with a lower value are served first and preempted last
    logprobs            None: none; k: the log-probability of each token and of the k most likely ones, before or after
                        temperature and filters as `EngineConfig.logprobs_mode` says
    prompt_logprobs     the same for the prompt's tokens, each given those before it, with their ranks; always before
                        temperature and filters
    grammar             grammar of each sample's text. Tokens that it rules out are never sampled, and `logprobs` are
                        taken over the allowed tokens. A sample ends when its text is complete; min_tokens and
                        ignore_eos contradict that and are refused
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    priority: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        every = zip(_CHECKS, msgspec.structs.astuple(self), self.__struct_defaults__, strict=True)
        for (field, check), value, default in every:
            if value is not default:  # most fields have their default, which needs no check
                check(field, value)
                if isinstance(value, list | dict):  # of the caller, who may change it
                    msgspec.structs.force_setattr(self, field, tuple(value) if isinstance(value, list) else dict(value))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidField("min_tokens", self.min_tokens, f"at most {self.max_tokens}, the maximum of tokens")
        if self.grammar is not None and self.min_tokens:
            raise InvalidField("min_tokens", self.min_tokens, "0 together with a grammar, which says when a text ends")
        if self.grammar is not None and self.ignore_eos:
            raise InvalidField("ignore_eos", self.ignore_eos, "false together with a grammar, whose texts end")

    @property
    def filters(self) -> bool:
        """Return whether top-k, top-p or min-p filter the distribution before sampling."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def penalises(self) -> bool:
        """Return whether the logits depend on earlier tokens, by any penalty."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1

    def truncate(self, prompt: list[int], max_model_len: int, begin: int = 0) -> list[int]:
        """Return what `truncate_prompt_tokens` keeps of the prompt: its first `begin` tokens, and its end.

        At -1, it keeps what leaves room for the output.
        """
        kept = self.truncate_prompt_tokens
        if kept == -1:
            kept = max(max_model_len - (1 if self.max_tokens is None else self.max_tokens), 1)
        if kept is None or kept >= len(prompt):
            return prompt
        begin = min(begin, kept)
        return prompt[:begin] + prompt[len(prompt) - kept + begin :]


def seeded(params: SamplingParams, seed: int) -> SamplingParams:
    """Return a copy with another seed, without checking the fields again."""
    found = copy(params)
    msgspec.structs.force_setattr(found, "seed", seed)
    return found


Check = Callable[[str, object], None]
Stage = Literal["sample", "filter", "penalty"]


class DeviceColumn(NamedTuple):
    """Tensor on the device with a parameter's value for each slot.

    dtype  its name in NumPy and in torch
    stage  part of sampling that reads the column: "sample" for every row; "filter" and "penalty" for rows that filter
           or penalise, as the field of the same name of tok_kernels' `Filters` or `Penalties`
    """

    dtype: Literal["int32", "int64", "float32"]
    stage: Stage


class Parameter(NamedTuple):
    """Row of the table of sampling parameters.

    check   raises InvalidField unless the value is allowed
    column  where the value is on the device; None: only the manager and the engine use it
    """

    check: Check
    column: DeviceColumn | None = None


def _integer(low: int, high: int, *, may_be_none: bool = False) -> Check:
    def check(field: str, value: object) -> None:
        if (type(value) is not int or not low <= value <= high) and not (may_be_none and value is None):
            raise InvalidField(field, value, f"integers from {low} to {high}")

    return check


def _number(low: float, high: float) -> Check:
    def check(field: str, value: object) -> None:
        # By exact type: NumPy's float64 is a float, too, but cannot be sent.
        real = type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
        if not real or not low <= float(value) <= high:  # type: ignore[arg-type]
            raise InvalidField(field, value, f"numbers from {low:g} to {high:g}")

    return check


def _top_p(field: str, value: object) -> None:
    _number(0.0, 1.0)(field, value)
    if value == 0:
        raise InvalidField(field, value, "above 0, at most 1")


def _switch(field: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidField(field, value, "true or false")


def _grammar(field: str, value: object) -> None:
    if not isinstance(value, Grammar):
        raise InvalidField(field, value, "a Grammar")


def _biases(field: str, value: object) -> None:
    if not isinstance(value, dict):
        raise InvalidField(field, value, "a mapping of token ids to numbers")
    for token, bias in value.items():
        _TOKEN(field, token)
        _BIAS(field, bias)
    if len(value) > MAX_BIASES:
        raise InvalidField(field, Amount(f"{len(value)} entries"), f"at most {MAX_BIASES}")


def _stop_ids(field: str, value: object) -> None:
    if not isinstance(value, tuple | list):
        raise InvalidField(field, value, "a tuple of token ids")
    if len(value) > MAX_STOP_IDS:
        raise InvalidField(field, Amount(f"{len(value)} ids"), f"at most {MAX_STOP_IDS}")
    for token in value:
        _TOKEN(field, token)


def _allowed_ids(field: str, value: object) -> None:
    if not isinstance(value, tuple | list):
        raise InvalidField(field, value, "a tuple of token ids")
    if not value:
        raise InvalidField(field, Amount("0 ids"), "at least one")
    if set(map(type, value)) != {int} or min(value) < 0 or max(value) > INT63:  # may list a whole vocabulary
        bad = next(token for token in value if type(token) is not int or not 0 <= token <= INT63)
        raise InvalidField(field, bad, f"integers from 0 to {INT63}")


def _truncation(field: str, value: object) -> None:
    if type(value) is not int or not (value == -1 or 1 <= value <= INT63):
        raise InvalidField(field, value, "integers from 1, or -1 for the model's length")


def _strings(max_strings: int, max_length: int) -> Check:
    def check(field: str, value: object) -> None:
        if not isinstance(value, tuple | list):
            raise InvalidField(field, value, "a tuple of strings")
        if len(value) > max_strings:
            raise InvalidField(field, Amount(f"{len(value)} strings"), f"at most {max_strings}")
        for text in value:
            # A subclass of str cannot be sent to the manager.
            if type(text) is not str or not 1 <= len(text) <= max_length:
                raise InvalidField(field, text, f"strings of 1 to {max_length} characters")
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise InvalidField(field, text, "valid Unicode, without lone surrogates")

    return check


_TOKEN, _BIAS = _integer(0, INT63), _number(-100.0, 100.0)
_PARAMETERS: Final[Mapping[str, Parameter]] = {
    "n": Parameter(_integer(1, MAX_N)),
    "max_tokens": Parameter(_integer(0, INT63, may_be_none=True)),
    "min_tokens": Parameter(_integer(0, INT63)),
    "temperature": Parameter(_number(0.0, 100.0), DeviceColumn("float32", "sample")),
    "top_k": Parameter(_integer(-1, INT63), DeviceColumn("int32", "filter")),
    "top_p": Parameter(_top_p, DeviceColumn("float32", "filter")),
    "min_p": Parameter(_number(0.0, 1.0), DeviceColumn("float32", "filter")),
    "presence_penalty": Parameter(_number(-2.0, 2.0), DeviceColumn("float32", "penalty")),
    "frequency_penalty": Parameter(_number(-2.0, 2.0), DeviceColumn("float32", "penalty")),
    "repetition_penalty": Parameter(_number(1e-3, 1e3), DeviceColumn("float32", "penalty")),
    "logit_bias": Parameter(_biases),
    "allowed_token_ids": Parameter(_allowed_ids),
    "bad_words": Parameter(_strings(MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH)),
    "seed": Parameter(_integer(-INT63 - 1, INT63), DeviceColumn("int64", "sample")),
    "stop": Parameter(_strings(MAX_STOP_STRINGS, MAX_STOP_LENGTH)),
    "stop_token_ids": Parameter(_stop_ids),
    "ignore_eos": Parameter(_switch),
    "include_stop_str_in_output": Parameter(_switch),
    "skip_special_tokens": Parameter(_switch),
    "truncate_prompt_tokens": Parameter(_truncation),
    "priority": Parameter(_integer(-MAX_PRIORITY, MAX_PRIORITY)),
    "logprobs": Parameter(_integer(0, MAX_LOGPROBS)),
    "prompt_logprobs": Parameter(_integer(0, MAX_PROMPT_LOGPROBS)),
    "grammar": Parameter(_grammar),
}
_CHECKS: list[tuple[str, Check]] = [(field, _PARAMETERS[field].check) for field in SamplingParams.__struct_fields__]

DEVICE_COLUMNS: Final[Mapping[str, DeviceColumn]] = {
    field: parameter.column for field, parameter in _PARAMETERS.items() if parameter.column is not None
}
"""Columns of the device's state by the field of SamplingParams that fills them.

A step's `NewSlots.sampling`, the worker's state and the inputs of the sampling kernels follow from this table.
"""
