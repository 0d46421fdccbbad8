"""SamplingParams: how the tokens of one request are drawn and when they end."""

from __future__ import annotations

import math

import msgspec

from tok_core.errors import InvalidField
from tok_core.grammar import Grammar

MAX_N = 16_384
MAX_LOGPROBS = 20
MAX_STOP_IDS = 64
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 4096
MAX_BIASES = 512
INT63 = (1 << 63) - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the tokens of one request are drawn and when they end. Checked when constructed (`InvalidField`).

    n                   samples of the prompt, sharing its prefill
    max_tokens          most tokens of each sample; None: up to the model's length; 0: only the prompt is computed
    min_tokens          end tokens, stop ids and stop strings have no effect before so many tokens
    temperature         0: always the most likely token
    top_k, top_p, min_p cut the distribution; 0, 1 and 0 switch them off
    presence_penalty, frequency_penalty   subtracted for tokens generated already, as in OpenAI's reference
    repetition_penalty  divides positive and multiplies negative logits of tokens in prompt or output (CTRL)
    logit_bias          token id -> addition to its logit
    seed                makes the tokens repeatable; None: a fresh one a request
    stop                strings that end a sample; they are not part of its text
    stop_token_ids      ids that end a sample, beside the model's own end ids
    ignore_eos          the model's own end ids do not end a sample
    priority            requests of a lower one are served first, and preempted last
    logprobs            None: none; k: each token's log-probability and those of the k most likely ones
    prompt_logprobs     the same of the prompt's tokens, each given those before it
    grammar             what the text of each sample must be: other tokens are impossible, and `logprobs` are those of
                        the tokens that are left. A sample whose text is complete ends; min_tokens and ignore_eos,
                        which speak against that, are refused
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
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    priority: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 0, INT63)
        _integer("min_tokens", self.min_tokens, 0, INT63)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidField("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        _number("temperature", self.temperature, 0.0, 100.0)
        _integer("top_k", self.top_k, -1, INT63)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise InvalidField("top_p", self.top_p, "above 0, at most 1")
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 1e-3, 1e3)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidField("ignore_eos", self.ignore_eos, "true or false")
        if self.seed is not None:
            _integer("seed", self.seed, -INT63 - 1, INT63)
        _integer("priority", self.priority, -INT63 - 1, INT63)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        self._check_grammar()
        self._check_lists()

    def _check_grammar(self) -> None:
        if not isinstance(self.grammar, Grammar | None):
            raise InvalidField("grammar", self.grammar, "a Grammar")
        if self.grammar is not None and self.min_tokens:
            raise InvalidField("min_tokens", self.min_tokens, "0 together with a grammar, which says when a text ends")
        if self.grammar is not None and self.ignore_eos:
            raise InvalidField("ignore_eos", self.ignore_eos, "false together with a grammar, whose texts end")

    def _check_lists(self) -> None:
        if not isinstance(self.logit_bias, dict | None):
            raise InvalidField("logit_bias", self.logit_bias, "a mapping of token ids to numbers")
        if not isinstance(self.stop_token_ids, tuple | list):
            raise InvalidField("stop_token_ids", self.stop_token_ids, "a tuple of token ids")
        for token, bias in (self.logit_bias or {}).items():
            _integer("logit_bias", token, 0, INT63)
            _number("logit_bias", bias, -100.0, 100.0)
        if len(self.logit_bias or {}) > MAX_BIASES:
            raise InvalidField("logit_bias", f"{len(self.logit_bias or {})} entries", f"at most {MAX_BIASES}")
        if not isinstance(self.stop, tuple | list):
            raise InvalidField("stop", self.stop, "a tuple of strings")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidField("stop", f"{len(self.stop)} strings", f"at most {MAX_STOP_STRINGS}")
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_LENGTH:
                raise InvalidField("stop", text, f"strings of 1 to {MAX_STOP_LENGTH} characters")
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise InvalidField("stop", text, "valid Unicode, without lone surrogates")
        if len(self.stop_token_ids) > MAX_STOP_IDS:
            raise InvalidField("stop_token_ids", f"{len(self.stop_token_ids)} ids", f"at most {MAX_STOP_IDS}")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, INT63)

    @property
    def filters(self) -> bool:
        """Whether the distribution is cut before drawing."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def penalises(self) -> bool:
        """Whether logits depend on the tokens already there."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1


def _integer(field: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise InvalidField(field, value, f"integers from {low} to {high}")


def _number(field: str, value: object, low: float, high: float) -> None:
    # By exact type: NumPy's float64 is a float, too, but cannot be sent.
    real = type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
    if not real or not low <= float(value) <= high:  # type: ignore[arg-type]
        raise InvalidField(field, value, f"numbers from {low:g} to {high:g}")
