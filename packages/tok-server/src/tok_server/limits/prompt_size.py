"""A text that cannot be a prompt is refused by its size, before all of it goes through the tokenizer.

Tokenising takes hundreds of bytes of memory a byte of text, so that a body far below its own limit could exhaust it.
"""

from __future__ import annotations

from functools import lru_cache

from tok_core.text import Tokenizer
from tok_server.wire import ApiError, invalid

# Normalisers may shrink a text: decomposed letters, runs of spaces.
SLACK, EXTRA = 4, 1024
# Characters a token from which on a text is counted first; texts that fit seldom have more than five.
LIKELY = 8
SLICE = 1 << 16  # characters


def check_size(text: str, tokenizer: Tokenizer, max_model_len: int, field: str) -> None:
    """Raises ApiError (400) naming `field` for a text that makes far more than `max_model_len` tokens.

    Takes no longer than tokenising about 2 × max_model_len tokens. InvalidField("text"): lone surrogates.
    """
    size, most = len(text.encode(errors="replace")), most_bytes(tokenizer, max_model_len)
    if size > most:
        raise _too_long(field, size, f"at most {most} bytes (the model's length is {max_model_len} tokens)")
    if len(text) > LIKELY * max_model_len and _far_longer(text, tokenizer, max_model_len):
        raise _too_long(field, size, f"texts of fewer than {max_model_len} tokens, the model's length")


def most_bytes(tokenizer: Tokenizer, max_model_len: int) -> int:
    """Bytes of UTF-8 that `max_model_len` tokens can stand for."""
    return SLACK * max_model_len * _longest_piece(tokenizer) + EXTRA


@lru_cache(maxsize=8)
def _longest_piece(tokenizer: Tokenizer) -> int:
    return max(map(len, tokenizer.pieces), default=1)


def _far_longer(text: str, tokenizer: Tokenizer, max_model_len: int) -> bool:
    """Whether slices of the text make more than twice as many tokens: each cut can only add a few."""
    count = 0
    for start in range(0, len(text), SLICE):
        count += len(tokenizer.encode(text[start : start + SLICE], add_special_tokens=False))
        if count > 2 * max_model_len:
            return True
    return False


def _too_long(field: str, size: int, allowed: str) -> ApiError:
    return invalid(field, f"{field} is a text of {size} bytes; allowed: {allowed}")
