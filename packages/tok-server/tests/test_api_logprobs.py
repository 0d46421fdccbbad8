"""Token texts and text offsets of log-probabilities, for tokens of any bytes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tok_core import TokenLogprob
from tok_core.text import Tokenizer
from tok_server.openai.generation.logprobs import MIN_LOGPROB, TextOffsets, chat_logprobs, completion_logprobs
from tok_server.openai.generation.serializer import TokenTexts
from tok_server.wire.json import encode


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.load(tiny_model)


PIECES = st.one_of(st.binary(min_size=1, max_size=5), st.characters(codec="utf-8").map(str.encode))
CUT = st.lists(st.sampled_from([b"\xe2", b"\x82", b"\xac", b"\xf0", b"\x80", b"a", "é".encode()]))


@given(st.one_of(st.lists(st.one_of(PIECES, st.just(b""))), CUT))
def test_text_offset_is_that_of_the_character_of_the_first_byte(pieces: list[bytes]) -> None:
    offsets = TextOffsets()
    before = b""
    for piece in pieces:
        offset = offsets.next(piece)
        if piece:
            up_to_first_byte = (before + piece[:1]).decode("utf-8", "replace")
            assert offset == len(up_to_first_byte) - 1
        before += piece


def test_token_with_part_of_a_character_is_shown_as_bytes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("€", add_special_tokens=False)
    assert len(ids) > 1  # the vocabulary has no token for the character
    texts = TokenTexts(tokenizer)
    entries = [TokenLogprob(token, -1.0, ((token, -1.0),)) for token in ids]
    shown = completion_logprobs(entries, texts, TextOffsets())
    assert "".join(token.removeprefix("bytes:") for token in shown.tokens) == "\\xe2\\x82\\xac"
    assert all(token.startswith("bytes:") for token in shown.tokens)
    assert shown.text_offset == [0] * len(ids)
    chat = chat_logprobs(entries, texts).content
    assert chat is not None
    assert b"".join(bytes(entry.bytes or []) for entry in chat).decode() == "€"
    assert all(entry.token.startswith("\\x") for entry in chat)


def test_special_tokens_are_named_but_do_not_advance_text_offset(tokenizer: Tokenizer) -> None:
    (special,) = tokenizer.encode("<|eot_id|>", add_special_tokens=False)
    (letter,) = tokenizer.encode("z", add_special_tokens=False)
    entries = [TokenLogprob(token, -1.0) for token in (letter, special, letter)]
    shown = completion_logprobs(entries, TokenTexts(tokenizer), TextOffsets())
    assert shown.tokens == ["z", "<|eot_id|>", "z"]
    assert shown.text_offset == [0, 1, 1]


def test_infinite_and_nan_logprobs_are_sent_as_minus_9999(tokenizer: Tokenizer) -> None:
    entry = TokenLogprob(65, -math.inf, ((66, -0.5), (67, -math.inf), (68, math.nan)))
    texts = TokenTexts(tokenizer)
    completion = completion_logprobs([entry], texts, TextOffsets())
    assert completion.token_logprobs == [MIN_LOGPROB]
    sent = encode(completion) + encode(chat_logprobs([entry], texts))
    assert b"null" not in encode(completion)
    assert b"inf" not in sent.lower()
    assert b"nan" not in sent.lower()
    assert sent.count(b"-9999.0") == 7


def test_top_logprobs_always_include_the_sampled_token(tokenizer: Tokenizer) -> None:
    shown = completion_logprobs(
        [TokenLogprob(65, -9.0, ((66, -0.5),)), TokenLogprob(65, -9.0)], TokenTexts(tokenizer), TextOffsets()
    )
    assert shown.top_logprobs is not None
    assert [len(likeliest or {}) for likeliest in shown.top_logprobs] == [2, 1]


def test_top_logprobs_name_the_sampled_token_with_its_own_logprob(tokenizer: Tokenizer) -> None:
    size = tokenizer.vocab_size  # ids from there on have the same text, none
    entry = TokenLogprob(size, -9.0, ((size + 1, -0.5), (65, -1.0), (size + 2, -2.0)))
    shown = completion_logprobs([entry], TokenTexts(tokenizer), TextOffsets())
    assert shown.top_logprobs == [{"": -9.0, tokenizer.piece(65).decode(): -1.0}]


def test_logprobs_without_a_tokenizer_name_tokens_by_id() -> None:
    shown = completion_logprobs([TokenLogprob(7, -1.0)], TokenTexts(None), TextOffsets())
    assert shown.tokens == ["token_id:7"]
    assert shown.text_offset == [0]
