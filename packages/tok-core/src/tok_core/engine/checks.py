"""Validate requests against the engine's limits before they are sent; errors name the field."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from hashlib import blake2b

import numpy as np

from tok_core.engine.open_requests import TokenSequences
from tok_core.errors import Amount, ContextLengthExceeded, InvalidField
from tok_core.messages import EngineInfo, Int32
from tok_core.sampling_params import SamplingParams
from tok_core.text import Tokenizer

Params = SamplingParams | Sequence[SamplingParams]
MAX_BAD_WORD_TOKENS = 16  # tokens of a bad word; also the width of the device's table of bias prefixes
MAX_CACHE_SALT = 4096  # characters
MAX_TENANT = 256  # characters of a caller's name; longer than any hash
MIN_NUMPY_COUNT = 64  # up to this number of token ids, Python's min and max are faster than NumPy's


def check_request(ids: list[int], params: SamplingParams, info: EngineInfo, *, has_tokenizer: bool) -> Int32:
    """Return the prompt's token ids as an array. Raise InvalidField for a request that cannot be served."""
    if not ids:
        raise InvalidField("prompt", ids, "at least one token")
    max_output, min_output = info.max_model_len - len(ids), min_output_tokens(params)
    if max_output < min_output:
        allowed = f"at most {info.max_model_len - min_output}" + ", so that one can follow" * min_output
        raise ContextLengthExceeded("prompt", Amount(f"{len(ids)} tokens"), allowed, info.max_model_len)
    tokens = _tokens(ids, info.vocab_size)
    for field, count in (("max_tokens", params.max_tokens), ("min_tokens", params.min_tokens)):
        if count is not None and count > max_output:
            raise ContextLengthExceeded(field, count, f"at most {max_output} after this prompt", info.max_model_len)
    if params.grammar is not None and not has_tokenizer:
        raise InvalidField("grammar", params.grammar.kind, "none, because the model has no tokenizer")
    if params.grammar is not None and not any(token < info.vocab_size for token in info.eos_token_ids):
        raise InvalidField("grammar", params.grammar.kind, "none, because the model has no token that ends a text")
    if params.stop and not has_tokenizer:
        raise InvalidField("stop", params.stop, "none, because the model has no tokenizer")
    if params.prompt_logprobs is not None and params.prompt_logprobs > info.vocab_size:
        allowed = f"integers from 0 to {info.vocab_size} (the size of the vocabulary)"
        raise InvalidField("prompt_logprobs", params.prompt_logprobs, allowed)
    for field, named in (
        ("logit_bias", params.logit_bias),
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids),
    ):
        if named and max(named) >= info.vocab_size:
            raise InvalidField(field, max(named), f"ids from 0 to {info.vocab_size - 1}")
    return tokens


def banned_sequences(params: SamplingParams, tokenizer: Tokenizer | None, info: EngineInfo) -> TokenSequences:
    """Return the token sequences that `bad_words` bans: each word with and without a space before it.

    Raise InvalidField if they cannot be banned, or if they and the other parameters might leave no token to sample.
    """
    banned: TokenSequences = ()
    if params.bad_words:
        if tokenizer is None:
            raise InvalidField("bad_words", params.bad_words, "none, because the model has no tokenizer")
        banned = _sequences(tuple(params.bad_words), tokenizer, info.vocab_size)
    if banned or params.allowed_token_ids is not None:
        _require_allowed_token(params, banned, info)
    return banned


@lru_cache(maxsize=64)  # many requests have the same words
def _sequences(words: tuple[str, ...], tokenizer: Tokenizer, vocab_size: int) -> TokenSequences:
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        text = word.lstrip()
        for variant in (text, f" {text}") if text else (word,):
            sequence = tuple(tokenizer.encode(variant, add_special_tokens=False))
            if len(sequence) > MAX_BAD_WORD_TOKENS:
                raise InvalidField("bad_words", word, f"words of at most {MAX_BAD_WORD_TOKENS} tokens")
            if sequence and max(sequence) < vocab_size:  # larger ids are never sampled
                sequences[sequence] = None
    return tuple(sequences)


def _require_allowed_token(params: SamplingParams, banned: TokenSequences, info: EngineInfo) -> None:
    """Raise InvalidField unless some token may be sampled after every context."""
    never = {sequence[-1] for sequence in banned}
    if params.min_tokens:
        never |= {*params.stop_token_ids, *(() if params.ignore_eos else info.eos_token_ids)}
    if params.allowed_token_ids is not None and never.issuperset(params.allowed_token_ids):
        allowed = "also a token that neither bad_words nor min_tokens rules out"
        raise InvalidField("allowed_token_ids", list(params.allowed_token_ids[:8]), allowed)
    if len(never) >= info.vocab_size:
        raise InvalidField(
            "bad_words", Amount(f"{len(params.bad_words)} words"), "words that leave some token to sample"
        )


def salt_of(cache_salt: str | None) -> bytes:
    """Return the salt as sent to the manager: a 16-byte hash, or b"" for None. Raise InvalidField if it is invalid."""
    if cache_salt is None:
        return b""
    if type(cache_salt) is not str or not 1 <= len(cache_salt) <= MAX_CACHE_SALT:
        raise InvalidField("cache_salt", cache_salt, f"a string of 1 to {MAX_CACHE_SALT} characters")
    return blake2b(cache_salt.encode(errors="surrogatepass"), digest_size=16).digest()


def check_tenant(tenant: str) -> None:
    """Raise InvalidField for an invalid tenant name."""
    if type(tenant) is not str or len(tenant) > MAX_TENANT:
        raise InvalidField("tenant", tenant, f"a string of at most {MAX_TENANT} characters")


def min_output_tokens(params: SamplingParams) -> int:
    """Return how many tokens must fit after the prompt."""
    return 0 if params.max_tokens == 0 else 1


def _tokens(ids: list[int], vocab_size: int) -> Int32:
    with suppress(OverflowError):  # an id exceeds 32 bits
        if set(map(type, ids)) == {int}:  # NumPy would accept True as 1, and 1.5
            tokens = np.array(ids, np.int32)
            if len(ids) <= MIN_NUMPY_COUNT:
                if min(ids) >= 0 and max(ids) < vocab_size:
                    return tokens
            elif tokens.view(np.uint32).max() < vocab_size:  # negative ids are large as uint32
                return tokens
    bad = next(token for token in ids if type(token) is not int or not 0 <= token < vocab_size)
    raise InvalidField("prompt", bad, f"token ids from 0 to {vocab_size - 1}")


def params_per_prompt(params: Params | None, count: int) -> list[SamplingParams]:
    """Return the parameters of each of `count` prompts. `params`: one for all prompts, or a list with one for each.

    Raises InvalidField for anything else.
    """
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(entry, SamplingParams) for entry in params):
        raise InvalidField("params", params, "SamplingParams, or a list of them")
    if len(params) != count:
        raise InvalidField("params", Amount(f"{len(params)} entries"), f"one for each of {count} prompts")
    return list(params)
