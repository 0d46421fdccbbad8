"""Streamed text equals that of a whole decode for every split of the stream, and is never shown early."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from support.tiny_tokenizer import SPECIAL_TOKENS, write_tokenizer
from tok_core.text import Detokeniser, Tokenizer

TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | st.text("the <é🙂日|>\n")
Model = tuple[Tokenizer, tokenizers.Tokenizer]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, 512)
    return Tokenizer.load(directory), tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))


def streamed(detokeniser: Detokeniser, ids: list[int], sizes: list[int]) -> list[str]:
    """Return the text of each push; pushes have `sizes` tokens in turn."""
    parts, at, turn = [], 0, 0
    while at < len(ids):
        size = sizes[turn % len(sizes)]
        parts.append(detokeniser.push(ids[at : at + size]))
        at, turn = at + size, turn + 1
    return parts


SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=4)
STOPS = st.lists(st.text("the é", min_size=1, max_size=4), max_size=2)


@given(st.lists(st.integers(0, 340), max_size=40), SIZES, STOPS)
def test_streamed_text_equals_the_decode_of_the_whole(
    model: Model, ids: list[int], sizes: list[int], stops: list[str]
) -> None:
    tokenizer, library = model
    detokeniser = Detokeniser(tokenizer, stops)
    text = "".join(streamed(detokeniser, ids, sizes)) + detokeniser.finish()
    assert text == library.decode(ids, skip_special_tokens=True)


@given(st.lists(st.integers(0, 340), max_size=40), SIZES, STOPS, st.data())
def test_continuation_equals_the_sum_of_the_stream(
    model: Model, ids: list[int], sizes: list[int], stops: list[str], data: st.DataObject
) -> None:
    tokenizer, _ = model
    detokeniser = Detokeniser(tokenizer, stops)
    shown = "".join(streamed(detokeniser, ids, sizes))
    # A cut may lie behind the last byte shown, and only if there are stop strings.
    cuts = st.none() | st.integers(detokeniser._released, detokeniser._seen) if stops else st.none()
    keep = data.draw(cuts)
    assert tokenizer.continuation(np.array(ids, np.int32), keep) == shown + detokeniser.finish(keep)


def test_continuation_rejects_a_cut_beyond_the_end(model: Model) -> None:
    tokenizer, _ = model
    ids = np.array(ids_of(tokenizer, "abc"), np.int32)
    assert [tokenizer.continuation(ids, keep) for keep in range(4)] == ["", "a", "ab", "abc"]
    assert tokenizer.continuation(np.array([9999, 5], np.int32)) == tokenizer.decode([5])
    for wrong in (-1, 4):
        with pytest.raises(ValueError, match="the pieces have 3"):
            tokenizer.continuation(ids, wrong)


@given(TEXTS, SIZES)
def test_detokenizer_shows_each_character_once_complete(model: Model, text: str, sizes: list[int]) -> None:
    tokenizer, _ = model
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokeniser = Detokeniser(tokenizer)
    shown = ""
    for token in range(len(ids)):
        shown += detokeniser.push(ids[token : token + 1])
        so_far = b"".join(tokenizer.pieces_of(ids[: token + 1], skip_special_tokens=True))
        assert shown == so_far.decode(errors="ignore")
    assert detokeniser.finish() == ""


def test_an_emoji_split_over_tokens_comes_in_one_piece(model: Model) -> None:
    tokenizer, _ = model
    bytes_of_it = [tokenizer.pieces.index(bytes([byte])) for byte in "🙂".encode()]
    detokeniser = Detokeniser(tokenizer)
    assert streamed(detokeniser, bytes_of_it, [1]) == ["", "", "", "🙂"]
    assert detokeniser.push(bytes_of_it[:3]) == ""
    assert detokeniser.finish() == "\ufffd"


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return one token per byte, without merges."""
    return [tokenizer.pieces.index(bytes([byte])) for byte in text.encode()]


def test_detokenizer_withholds_a_stop_string_prefix_until_ruled_out(model: Model) -> None:
    tokenizer, _ = model
    detokeniser = Detokeniser(tokenizer, ["ababc"])
    shown = streamed(detokeniser, ids_of(tokenizer, "xababab-"), [1])
    assert shown == ["x", "", "", "", "", "ab", "", "abab-"]
    assert detokeniser.finish() == ""


def test_a_stop_string_that_ended_the_sample_is_cut(model: Model) -> None:
    tokenizer, _ = model
    detokeniser = Detokeniser(tokenizer, ["stop"])
    assert detokeniser.push(ids_of(tokenizer, "go, stop")) == "go, "
    assert detokeniser.finish(keep_bytes=4) == ""


def test_stop_string_that_did_not_end_the_sample_is_shown(model: Model) -> None:
    tokenizer, _ = model
    detokeniser = Detokeniser(tokenizer, ["stop"])
    assert streamed(detokeniser, ids_of(tokenizer, "stop!"), [4, 1]) == ["", "stop!"]
    assert detokeniser.push(ids_of(tokenizer, "stop")) == ""
    assert detokeniser.finish() == "stop"


def test_stop_strings_that_overlap_are_each_withheld(model: Model) -> None:
    tokenizer, _ = model
    detokeniser = Detokeniser(tokenizer, ["aba"])
    assert streamed(detokeniser, ids_of(tokenizer, "ababa"), [1]) == ["", "", "", "ab", ""]
    assert detokeniser.finish(keep_bytes=2) == ""


def test_cut_positions_count_hidden_special_tokens(model: Model) -> None:
    tokenizer, library = model
    turn = SPECIAL_TOKENS[2]
    special = library.token_to_id(turn)
    assert special is not None
    detokeniser = Detokeniser(tokenizer, [f"b{turn}"])
    assert detokeniser.push([special, *ids_of(tokenizer, "ab"), special]) == "a"
    assert detokeniser.finish(keep_bytes=len(turn) + 1) == ""


def test_detokenizer_withholds_no_more_than_the_stop_string_length(model: Model) -> None:
    tokenizer, _ = model
    detokeniser = Detokeniser(tokenizer, ["a" * 50 + "b"])
    shown = streamed(detokeniser, ids_of(tokenizer, "a" * 5000), [1])
    assert [len(part) for part in shown] == [0] * 50 + [1] * 4950
    assert detokeniser.finish() == "a" * 50


def test_a_cut_of_text_already_shown_is_an_error(model: Model) -> None:
    tokenizer, _ = model
    detokeniser = Detokeniser(tokenizer, ["stop"])
    detokeniser.push(ids_of(tokenizer, "texts"))
    for wrong in (3, 6):
        with pytest.raises(ValueError, match="withheld are 4 to 5"):
            detokeniser.finish(keep_bytes=wrong)
    with pytest.raises(ValueError, match="there are no stop strings"):
        Detokeniser(tokenizer).finish(keep_bytes=0)


def test_generated_text_keeps_its_leading_space(tmp_path: Path) -> None:
    encoder = tokenizers.Tokenizer(tokenizers.models.BPE({"▁": 0, "a": 1, "▁a": 2}, [("▁", "a")]))
    encoder.decoder = tokenizers.decoders.Metaspace()
    encoder.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    detokeniser = Detokeniser(tokenizer)
    assert detokeniser.push([2, 2]) + detokeniser.finish() == " a a"
    assert tokenizer.continuation(np.array([2, 2], np.int32)) == " a a"
    assert tokenizer.decode([2, 2]) == "a a"
