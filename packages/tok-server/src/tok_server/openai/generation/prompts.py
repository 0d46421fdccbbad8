"""Turn prompts into token ids; refuse texts that are far too long before all of them go through the tokenizer.

Tokenising takes hundreds of bytes of memory per byte of text. A body far below its own limit could exhaust memory.
"""

from __future__ import annotations

import re
from functools import lru_cache

from tok_core import AsyncEngine, ContextLengthExceeded, InvalidField
from tok_core.errors import Amount
from tok_core.text import Tokenizer
from tok_server.wire import ApiError, invalid, invalid_field

# A factor and bytes of slack: normalisers may shrink a text (decomposed letters, runs of spaces).
SIZE_FACTOR, SIZE_EXTRA_BYTES = 4, 1024
# Characters per token above which a text's tokens are counted first; texts that fit rarely have more than five.
LIKELY_CHARS_PER_TOKEN = 8
SLICE_CHARS = 1 << 16
MAX_LOOP_PROMPT_BYTES = 8192  # bytes of a body that the event loop parses itself: some thousand token ids


def has_few_token_ids(field: str, body: bytes) -> bool:
    """Return whether `field` holds token ids, few enough for the event loop to parse the body itself.

    Text is parsed in a thread: the tokenizer is slow, and releases the GIL.
    """
    pattern = rb'"%b"\s*:\s*\[[\s\[]*\d' % field.encode()
    return len(body) <= MAX_LOOP_PROMPT_BYTES and re.search(pattern, body) is not None


def tokenise_prompts(
    prompts: list[str | list[int]],
    engine: AsyncEngine,
    field: str,
    *,
    add_special_tokens: bool = True,
    truncates: bool = False,
) -> list[list[int]]:
    """Return each prompt's token ids; all prompts are of one kind. Errors: ApiError.

    field      name of the prompts' field
    truncates  the caller keeps only the end of each prompt: of a far too long text, that is all that is tokenised
    """
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if not texts:
        return [prompt for prompt in prompts if isinstance(prompt, list)]
    if engine.tokenizer is None:
        raise invalid(field, f"{field} is text, but the model has no tokenizer; allowed: token ids")
    try:
        max_model_len = engine.info.max_model_len
        if truncates:
            texts = [text_end(text, engine.tokenizer, max_model_len) for text in texts]
        else:
            for index, text in enumerate(texts):
                check_prompt_size(text, engine.tokenizer, max_model_len, prompt_field_name(field, index, len(texts)))
        return engine.tokenizer.encode_batch(texts, add_special_tokens)
    except InvalidField as error:
        raise invalid(field, str(error)) from error


def prompt_field_name(field: str, index: int, count: int) -> str:
    """Return the name by which errors call prompt `index` of `count` in `field`."""
    return field if count == 1 else f"{field}[{index}]"


def check_prompt_size(text: str, tokenizer: Tokenizer, max_model_len: int, field: str) -> None:
    """Raise ApiError (400) naming `field` for a text of far more than `max_model_len` tokens.

    Takes no longer than tokenising about 2 × max_model_len tokens. Errors: InvalidField("text") for lone surrogates.
    """
    size, max_bytes = len(text.encode(errors="replace")), max_prompt_bytes(tokenizer, max_model_len)
    if size > max_bytes:
        raise _too_long(field, size, f"at most {max_bytes} bytes", max_model_len)
    if len(text) > LIKELY_CHARS_PER_TOKEN * max_model_len and _is_far_too_long(text, tokenizer, max_model_len):
        raise _too_long(field, size, f"texts of fewer than {max_model_len} tokens", max_model_len)


def text_end(text: str, tokenizer: Tokenizer, max_model_len: int) -> str:
    """Return the end of a long text, of about 2 × `max_model_len` tokens or more: truncation keeps at most half of it.

    Errors: InvalidField("text") for lone surrogates.
    """
    count, start = 0, len(text)
    if start <= LIKELY_CHARS_PER_TOKEN * max_model_len:
        return text
    while start > 0 and count <= 2 * max_model_len:
        end, start = start, max(0, start - min(SLICE_CHARS, LIKELY_CHARS_PER_TOKEN * max_model_len))
        count += len(tokenizer.encode(text[start:end], add_special_tokens=False))
    return text[start:]


def max_prompt_bytes(tokenizer: Tokenizer, max_model_len: int) -> int:
    """Return an upper bound of the UTF-8 bytes that `max_model_len` tokens can stand for."""
    return SIZE_FACTOR * max_model_len * _max_token_bytes(tokenizer) + SIZE_EXTRA_BYTES


@lru_cache(maxsize=8)
def _max_token_bytes(tokenizer: Tokenizer) -> int:
    return max(map(len, tokenizer.pieces), default=1)


def _is_far_too_long(text: str, tokenizer: Tokenizer, max_model_len: int) -> bool:
    """Return whether slices of the text make more than twice `max_model_len` tokens. Each cut adds only a few."""
    count = 0
    for start in range(0, len(text), SLICE_CHARS):
        count += len(tokenizer.encode(text[start : start + SLICE_CHARS], add_special_tokens=False))
        if count > 2 * max_model_len:
            return True
    return False


def _too_long(field: str, size: int, allowed: str, max_model_len: int) -> ApiError:
    return invalid_field(ContextLengthExceeded(field, Amount(f"{size} bytes"), allowed, max_model_len), field)
