"""What ends a sample: flags against brute force, search and stream against a search of the whole text."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from tok_core.errors import InvalidField
from tok_core.manager.stops import END, MAYBE_STRING, STOP_ID, StopHit, StopSets
from tok_core.sampling import SamplingParams
from tok_core.text import Detokeniser, Tokenizer
from tok_core.text.pieces import piece_decoder

# Few bytes, so that pieces and stop strings meet: two letters, and characters whose bytes overlap.
LETTERS = "ab\x00é詩🙂"
STOP = st.text(LETTERS + "<", min_size=1, max_size=5)
PIECE = st.binary(min_size=1, max_size=4) | st.builds(
    lambda text, start, end: text.encode()[start : end or None],
    st.text(LETTERS, min_size=1, max_size=4),
    st.integers(0, 2),
    st.integers(-2, 0),
)
PIECES = st.lists(PIECE, min_size=1, max_size=12)
SPECIAL = ["<a>", "b<"]


def flags(sets: StopSets, set_id: int, tokens: list[int]) -> list[int]:
    ids = np.full(len(tokens), set_id, np.int32)
    found = sets.classify(ids, np.array(tokens, np.int32))
    assert found.dtype == np.uint8
    return [int(flag) for flag in found]


def can_complete(piece: bytes, stop: bytes) -> bool:
    """Whether some beginning of `piece` ends with `stop`, or is a proper end of it."""
    beginnings = [piece[:end] for end in range(1, len(piece) + 1)]
    return any(text.endswith(stop) or (len(text) < len(stop) and stop.endswith(text)) for text in beginnings)


@given(st.lists(PIECE | st.just(b""), max_size=15), st.lists(STOP, min_size=1, max_size=3), st.integers(0, 2))
def test_the_tokens_flagged_are_exactly_those_that_can_complete_a_stop_string(
    pieces: list[bytes], stops: list[str], more: int
) -> None:
    sets = StopSets(len(pieces) + more, [], pieces)
    set_id = sets.acquire(SamplingParams(stop=tuple(stops)))
    for token, flag in enumerate(flags(sets, set_id, list(range(len(pieces) + more)))):
        piece = pieces[token] if token < len(pieces) else b""
        assert flag == MAYBE_STRING * any(can_complete(piece, stop.encode()) for stop in stops)


def test_a_stop_string_spelt_by_neighbours_in_the_vocabulary_flags_only_its_end() -> None:
    sets = StopSets(4, [], [b"xa", b"b", b"ab", b"a"])
    assert flags(sets, sets.acquire(SamplingParams(stop=("ab",))), [0, 1, 2, 3]) == [0, *[MAYBE_STRING] * 2, 0]


def byte_characters() -> dict[int, str]:
    """The byte alphabet, by letting the library spell characters of every leading and continuing byte."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    characters = [*range(0x800), *range(0x800, 0xD800, 0x40), *range(0xE000, 0x110000, 0x1000)]
    text = "".join(map(chr, characters))
    return dict(zip(text.encode(), split.pre_tokenize_str(text)[0][0], strict=True))


BYTE_CHARACTERS = byte_characters()


def tokenizer_of(pieces: list[bytes]) -> Tokenizer:
    """A real byte-level tokenizer with these pieces and `SPECIAL`."""
    tokens = dict.fromkeys("".join(BYTE_CHARACTERS.get(byte, "!") for byte in piece) for piece in pieces)
    encoder = tokenizers.Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    encoder.decoder = decoders.ByteLevel()
    encoder.add_special_tokens(SPECIAL)
    return Tokenizer(encoder, piece_decoder({"type": "ByteLevel"}), {})


def whole_text_search(pieces: list[bytes], stops: list[str]) -> StopHit | None:
    """The oracle: after each token, look for each stop string in all of the text so far."""
    for count in range(1, len(pieces) + 1):
        text = b"".join(pieces[:count])
        found = [(text.find(stop.encode()), stop) for stop in stops]
        ended = [(at + len(stop.encode()), at, stop) for at, stop in found if at >= 0]
        if ended:
            _, at, stop = min(ended)
            return StopHit(stop, count, at)
    return None


def text_before(tokenizer: Tokenizer, ids: list[int], cut: int) -> bytes:
    """Bytes to be shown of those before position `cut`."""
    shown, position = b"", 0
    for token in ids:
        piece = tokenizer.piece(token)
        if token not in tokenizer.special_ids:
            shown += piece[: max(0, cut - position)]
        position += len(piece)
    return shown


def search(sets: StopSets, set_id: int, ids: list[int]) -> StopHit | None:
    """As the manager does: token by token, and only where the token is flagged."""
    for count, flag in enumerate(flags(sets, set_id, ids), 1):
        hit = sets.find(set_id, np.array(ids[:count], np.int32))
        assert hit is None or flag & MAYBE_STRING
        if hit is not None:
            return hit
    return None


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tokenizer, list[int], list[str]]:
    tokenizer = tokenizer_of(draw(PIECES))
    ids = draw(st.lists(st.integers(0, tokenizer.vocab_size), max_size=25))
    stops = draw(st.lists(STOP | st.sampled_from(SPECIAL), min_size=1, max_size=3))
    text = b"".join(tokenizer.pieces_of(ids)).decode(errors="ignore")
    if text and draw(st.booleans()):
        start = draw(st.integers(0, len(text) - 1))
        stops.append(text[start : start + draw(st.integers(1, 12))])
    return tokenizer, ids, stops


@given(cases(), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_search_and_stream_agree_with_a_search_of_the_whole_text(
    case: tuple[Tokenizer, list[int], list[str]], sizes: list[int]
) -> None:
    tokenizer, ids, stops = case
    sets = StopSets(tokenizer.vocab_size + 1, [], tokenizer.pieces)
    hit = search(sets, sets.acquire(SamplingParams(stop=tuple(stops))), ids)
    assert hit == whole_text_search(tokenizer.pieces_of(ids), stops)

    ids = ids if hit is None else ids[: hit.token_count]
    cut = None if hit is None else hit.cut
    end = sum(map(len, tokenizer.pieces_of(ids))) if cut is None else cut
    expected = text_before(tokenizer, ids, end).decode(errors="replace")
    detokeniser = Detokeniser(tokenizer, stops)
    shown, at, turn = "", 0, 0
    while at < len(ids):
        shown += detokeniser.push(ids[at : at + sizes[turn % len(sizes)]])
        at, turn = at + sizes[turn % len(sizes)], turn + 1
        assert expected.startswith(shown)
    assert shown + detokeniser.finish(cut) == expected


def open_end(text: bytes, stop: bytes) -> int:
    """How many of the last bytes of `text` are a proper beginning of `stop`."""
    return max(count for count in range(len(stop)) if text.endswith(stop[:count]))


@given(cases())
def test_the_stream_withholds_only_what_may_begin_a_stop_string(
    case: tuple[Tokenizer, list[int], list[str]],
) -> None:
    tokenizer, ids, stops = case
    hit = whole_text_search(tokenizer.pieces_of(ids), stops)
    ids = ids if hit is None else ids[: hit.token_count - 1]
    detokeniser = Detokeniser(tokenizer, stops)
    shown = ""
    for count in range(1, len(ids) + 1):
        shown += detokeniser.push(ids[count - 1 : count])
        text = b"".join(tokenizer.pieces_of(ids[:count]))
        waiting = max(open_end(text, stop.encode()) for stop in stops)
        whole = text_before(tokenizer, ids[:count], len(text) - waiting)
        kept = whole.decode(errors="replace")
        # All of it but an unfinished character at its end, which a whole decode shows as one U+FFFD.
        assert shown in (kept, kept.removesuffix("\ufffd"))


def test_of_stop_strings_completed_at_once_the_first_to_end_counts_and_then_the_longest() -> None:
    sets = StopSets(3, [], [b"a", b"bcd", b"x"])
    tokens = np.array([2, 0, 1], np.int32)
    for stops, expected in [
        (("bcd", "ab"), StopHit("ab", 3, 1)),
        (("cd", "abcd", "d"), StopHit("abcd", 3, 1)),
        (("d", "cd"), StopHit("cd", 3, 3)),
    ]:
        assert sets.find(sets.acquire(SamplingParams(stop=stops)), tokens) == expected


@pytest.mark.parametrize("between", [0, 300])
def test_a_stop_string_may_be_longer_than_any_look_back(between: int) -> None:
    pieces = [b"a", b"", b"b", b"x"]
    stop = "a" * 2000 + "b"
    sets = StopSets(4, [], pieces)
    set_id = sets.acquire(SamplingParams(stop=(stop,)))
    body = ([0] + [1] * (between // 100)) * 2000
    assert sets.find(set_id, np.array([3, *body, 2], np.int32)) == StopHit(stop, len(body) + 2, 1)
    assert sets.find(set_id, np.array([*body[1 + between // 100 :], 2], np.int32)) is None


def test_a_special_token_can_be_a_stop_string() -> None:
    tokenizer = tokenizer_of([b"hi", b" a"])
    special = tokenizer.pieces.index(b"<a>")
    sets = StopSets(tokenizer.vocab_size, [], tokenizer.pieces)
    set_id = sets.acquire(SamplingParams(stop=("<a>",)))
    assert flags(sets, set_id, [0, 1, special]) == [0, 0, MAYBE_STRING]
    assert sets.find(set_id, np.array([0, special], np.int32)) == StopHit("<a>", 2, 2)


def test_end_ids_and_stop_ids_are_flagged_each_by_its_bit() -> None:
    sets = StopSets(8, [2, 5, 99], None)
    ids = [
        sets.acquire(params)
        for params in (
            SamplingParams(),
            SamplingParams(ignore_eos=True),
            SamplingParams(stop_token_ids=(1, 2)),
            SamplingParams(stop_token_ids=(5,), ignore_eos=True),
        )
    ]
    rows = [flags(sets, set_id, list(range(8))) for set_id in ids]
    assert rows[0] == [0, 0, END, 0, 0, END, 0, 0]
    assert rows[1] == [0] * 8
    assert rows[2] == [0, STOP_ID, END | STOP_ID, 0, 0, END, 0, 0]
    assert rows[3] == [0, 0, 0, 0, 0, STOP_ID, 0, 0]


def test_equal_sets_share_an_id_until_the_last_user_is_gone() -> None:
    sets = StopSets(4, [3], [b"a", b"b", b"c", b"d"])
    first = SamplingParams(stop=("a", "b"), stop_token_ids=(2, 1), seed=1)
    second = SamplingParams(stop=("b", "a", "b"), stop_token_ids=(1, 2), temperature=0)
    set_id = sets.acquire(first)
    assert sets.acquire(second) == set_id
    other = sets.acquire(SamplingParams(stop=("c",)))
    assert other != set_id
    sets.release(set_id)
    assert flags(sets, set_id, [0]) == [MAYBE_STRING]
    sets.release(set_id)
    assert sets.acquire(SamplingParams(stop_token_ids=(0,))) == set_id
    assert flags(sets, set_id, [0, 1, 2, 3]) == [STOP_ID, 0, 0, END]
    assert flags(sets, other, [0, 1, 2, 3]) == [0, 0, MAYBE_STRING, END]


CHOICES: list[Callable[[], SamplingParams]] = [
    lambda token=token, stop=stop, ignore=ignore: SamplingParams(  # type: ignore[misc]
        stop_token_ids=(token,), stop=(stop,) * bool(stop), ignore_eos=ignore
    )
    for token in range(3)
    for stop in ("", "a", "bc")
    for ignore in (False, True)
]


@given(st.lists(st.integers(0, len(CHOICES) - 1), max_size=60), st.randoms(use_true_random=False))
def test_rows_grow_and_are_used_anew_without_mixing_sets(order: list[int], rng: random.Random) -> None:
    pieces = [b"a", b"b", b"xc"]
    sets = StopSets(3, [1], pieces)
    held: list[tuple[int, SamplingParams]] = []
    for choice in order:
        params = CHOICES[choice]()
        held.append((sets.acquire(params), params))
        if rng.random() < 0.4:
            sets.release(held.pop(rng.randrange(len(held)))[0])
        for set_id, other in held:
            alone = StopSets(3, [1], pieces)
            assert flags(sets, set_id, [0, 1, 2]) == flags(alone, alone.acquire(other), [0, 1, 2])


def test_a_step_mixes_sets_in_one_lookup() -> None:
    sets = StopSets(3, [0], [b"a", b"b", b"c"])
    one = sets.acquire(SamplingParams(stop=("b",)))
    two = sets.acquire(SamplingParams(ignore_eos=True, stop_token_ids=(2,)))
    rows = np.array([one, two, two, one, one], np.int32)
    tokens = np.array([0, 0, 2, 2, 1], np.int32)
    assert sets.classify(rows, tokens).tolist() == [END, 0, STOP_ID, 0, MAYBE_STRING]


@pytest.mark.parametrize(
    ("params", "pieces", "message"),
    [
        (SamplingParams(stop=("a",)), None, "^stop is .*no tokenizer"),
        (SamplingParams(stop_token_ids=(4,)), [b"a"], "^stop_token_ids is 4; allowed: ids from 0 to 3"),
    ],
)
def test_what_cannot_end_a_sample_is_refused_and_nothing_acquired(
    params: SamplingParams, pieces: list[bytes] | None, message: str
) -> None:
    sets = StopSets(4, [3], pieces)
    with pytest.raises(InvalidField, match=message):
        sets.acquire(params)
    assert flags(sets, sets.acquire(SamplingParams()), [0, 1, 2, 3]) == [0, 0, 0, END]
