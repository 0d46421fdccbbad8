"""Stop sets flag tokens and find stop strings as a brute-force search of the whole text does."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from support.stop_search import whole_text_search
from tok_core.errors import InvalidField
from tok_core.manager.stops import END, MAYBE_STRING, STOP_ID, WITHIN, StopHit, StopSets, TokenRows
from tok_core.sampling_params import SamplingParams
from tok_core.text import Detokeniser, Tokenizer
from tok_core.text.pieces import piece_decoder

# Few bytes, so that stop strings match often: two letters, and characters whose bytes overlap.
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
    """Return the flags of each token, without WITHIN."""
    return [flag & ~WITHIN for flag in all_flags(sets, set_id, tokens)]


def all_flags(sets: StopSets, set_id: int, tokens: list[int]) -> list[int]:
    ids = np.full(len(tokens), set_id, np.int32)
    found = sets.classify(ids, np.array(tokens, np.int32))
    assert found.dtype == np.uint8
    return [int(flag) for flag in found]


def can_complete(piece: bytes, stop: bytes) -> int:
    """Return MAYBE_STRING if a prefix of `piece` ends with `stop` or is a proper suffix of it, else 0.

    WITHIN is added if a prefix ends with `stop`, or is such a suffix of more than seven bytes.
    """
    prefixes = [piece[:end] for end in range(1, len(piece) + 1)]
    whole = any(text.endswith(stop) for text in prefixes)
    sizes = [len(text) for text in prefixes if len(text) < len(stop) and stop.endswith(text)]
    return MAYBE_STRING * (whole or bool(sizes)) | WITHIN * (whole or max(sizes, default=0) > 7)


@given(st.lists(PIECE | st.just(b""), max_size=15), st.lists(STOP, min_size=1, max_size=3), st.integers(0, 2))
def test_flagged_tokens_are_exactly_those_that_can_end_a_stop_string(
    pieces: list[bytes], stops: list[str], more: int
) -> None:
    sets = StopSets(len(pieces) + more, [], pieces)
    set_id = sets.acquire(SamplingParams(stop=tuple(stops)))
    for token, flag in enumerate(all_flags(sets, set_id, list(range(len(pieces) + more)))):
        piece = pieces[token] if token < len(pieces) else b""
        assert flag == reduce(or_, (can_complete(piece, stop.encode()) for stop in stops))


def test_stop_string_spanning_vocabulary_entries_flags_no_extra_token() -> None:
    sets = StopSets(4, [], [b"xa", b"b", b"ab", b"a"])
    assert flags(sets, sets.acquire(SamplingParams(stop=("ab",))), [0, 1, 2, 3]) == [0, *[MAYBE_STRING] * 2, 0]


def byte_characters() -> dict[int, str]:
    """Return the byte-level alphabet, as the library spells characters of every leading and continuing byte."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    characters = [*range(0x800), *range(0x800, 0xD800, 0x40), *range(0xE000, 0x110000, 0x1000)]
    text = "".join(map(chr, characters))
    return dict(zip(text.encode(), split.pre_tokenize_str(text)[0][0], strict=True))


BYTE_CHARACTERS = byte_characters()


def tokenizer_of(pieces: list[bytes]) -> Tokenizer:
    """Return a real byte-level tokenizer with these pieces and `SPECIAL`."""
    tokens = dict.fromkeys("".join(BYTE_CHARACTERS.get(byte, "!") for byte in piece) for piece in pieces)
    encoder = tokenizers.Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    encoder.decoder = decoders.ByteLevel()
    encoder.add_special_tokens(SPECIAL)
    return Tokenizer(encoder, piece_decoder({"type": "ByteLevel"}), {})


def text_before(tokenizer: Tokenizer, ids: list[int], cut: int) -> bytes:
    """Return the visible bytes before position `cut`."""
    shown, position = b"", 0
    for token in ids:
        piece = tokenizer.piece(token)
        if token not in tokenizer.special_ids:
            shown += piece[: max(0, cut - position)]
        position += len(piece)
    return shown


def search(sets: StopSets, set_id: int, ids: list[int]) -> tuple[int, StopHit] | None:
    """Search token by token, as the manager does, and return the first hit and the number of tokens then.

    Check that flags and prefilter allow each hit.
    """
    possible = sets.possible(
        np.full(len(ids), set_id, np.int32), rows_of([ids[:count] for count in range(1, 1 + len(ids))])
    )
    for count, flag in enumerate(all_flags(sets, set_id, ids), 1):
        hit = sets.find(set_id, np.array(ids[:count], np.int32))
        assert hit is None or flag & MAYBE_STRING
        assert hit is None or flag & WITHIN or possible[count - 1]
        if hit is not None:
            return count, hit
    return None


def rows_of(samples: list[list[int]], prompts: Sequence[list[int]] = ()) -> TokenRows:
    """Return rows with each sample in a slot, in reverse order, behind its prompt if it has one."""
    prompts = prompts or [[] for _ in samples]
    known = [prompt + sample for prompt, sample in zip(prompts, samples, strict=True)]
    tokens = np.full((len(samples), max(map(len, known), default=1)), -1, np.int32)
    for row, of in zip(tokens[::-1], known, strict=True):
        row[: len(of)] = of
    slot = np.arange(len(samples))[::-1]
    first, last = np.array([[len(prompt) for prompt in prompts], [len(of) - 1 for of in known]], np.int32)
    return TokenRows(tokens, slot, first, last)


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
def test_stop_search_and_stream_agree_with_a_search_of_the_whole_text(
    case: tuple[Tokenizer, list[int], list[str]], sizes: list[int]
) -> None:
    tokenizer, ids, stops = case
    sets = StopSets(tokenizer.vocab_size + 1, [], tokenizer.pieces, tokenizer.special_ids)
    found = search(sets, sets.acquire(SamplingParams(stop=tuple(stops))), ids)
    assert found == whole_text_search(tokenizer.pieces_of(ids), stops, shown=tokenizer.pieces_of(ids, True))

    cut = None
    if found is not None:
        ids, cut = ids[: found[0]], found[1].cut
    end = sum(map(len, tokenizer.pieces_of(ids))) if cut is None else cut
    expected = text_before(tokenizer, ids, end).decode(errors="replace")
    detokeniser = Detokeniser(tokenizer, stops)
    shown, at, turn = "", 0, 0
    while at < len(ids):
        shown += detokeniser.push(ids[at : at + sizes[turn % len(sizes)]])
        at, turn = at + sizes[turn % len(sizes)], turn + 1
        assert expected.startswith(shown)
    shown += detokeniser.finish(cut)
    assert shown == expected == tokenizer.continuation(np.array(ids, np.int32), cut)
    assert not any(stop in shown for stop in stops)


def open_end(text: bytes, stop: bytes) -> int:
    """Return how many of the last bytes of `text` are a proper prefix of `stop`."""
    return max(count for count in range(len(stop)) if text.endswith(stop[:count]))


@given(cases())
def test_detokenizer_withholds_only_a_possible_stop_string_prefix(
    case: tuple[Tokenizer, list[int], list[str]],
) -> None:
    tokenizer, ids, stops = case
    found = whole_text_search(tokenizer.pieces_of(ids), stops, shown=tokenizer.pieces_of(ids, True))
    ids = ids if found is None else ids[: found[0] - 1]
    detokeniser = Detokeniser(tokenizer, stops)
    shown = ""
    for count in range(1, len(ids) + 1):
        shown += detokeniser.push(ids[count - 1 : count])
        text, visible = (b"".join(tokenizer.pieces_of(ids[:count], hide)) for hide in (False, True))
        waiting = max(open_end(text, stop.encode()) for stop in stops)
        whole = text_before(tokenizer, ids[:count], len(text) - waiting)
        whole = whole[: len(visible) - max(open_end(visible, stop.encode()) for stop in stops)]
        kept = whole.decode(errors="replace")
        # All of `kept` but an unfinished character at its end, which a whole decode shows as one U+FFFD.
        assert shown in (kept, kept.removesuffix("\ufffd"))


ROW = st.tuples(st.integers(0, 3), *[st.lists(st.integers(0, 11), max_size=12)] * 2, st.integers(0, 11))


@given(PIECES, st.lists(st.lists(STOP, min_size=1, max_size=4), min_size=4, max_size=4), st.lists(ROW, max_size=20))
def test_stop_prefilter_keeps_every_row_that_a_search_would_hit(
    pieces: list[bytes], stops: list[list[str]], drawn: list[tuple[int, list[int], list[int], int]]
) -> None:
    sets = StopSets(len(pieces) + 1, [], pieces)
    held = [sets.acquire(SamplingParams(stop=tuple(strings))) for strings in stops]
    samples = [[token % len(pieces) for token in (*before, last)] for _, _, before, last in drawn]
    samples = [sample if row % 4 else [len(pieces), *sample] for row, sample in enumerate(samples)]
    rows = rows_of(samples, [[token % len(pieces) for token in prompt] for _, prompt, _, _ in drawn])
    ids = np.array([held[which] for which, *_ in drawn], np.int32)
    flag = sets.classify(ids, np.array([sample[-1] for sample in samples], np.int32))
    possible = sets.possible(ids, rows)
    for row, (sample, (which, *_)) in enumerate(zip(samples, drawn, strict=True)):
        hit = sets.find(held[which], np.array(sample, np.int32))
        if flag[row] & (MAYBE_STRING | WITHIN) == MAYBE_STRING:
            assert possible[row] or hit is None


PLAIN = [b"a", b"b", b"ab", b"ba", b"aab", b"babbb"]
PLAIN_ROW = st.tuples(st.integers(0, 2), *[st.lists(st.integers(0, 5), max_size=8)] * 2, st.integers(0, 5))


@given(st.lists(st.lists(st.text("ab", min_size=1, max_size=8), max_size=3), min_size=3, max_size=3), st.data())
def test_stop_prefilter_is_exact_for_short_stops_and_tokens_with_bytes(
    stops: list[list[str]], data: st.DataObject
) -> None:
    sets = StopSets(len(PLAIN), [], PLAIN)
    held = [sets.acquire(SamplingParams(stop=tuple(strings))) for strings in stops]
    drawn = data.draw(st.lists(PLAIN_ROW, min_size=1, max_size=30))
    samples = [[*before, last] for _, _, before, last in drawn]
    ids = np.array([held[which] for which, *_ in drawn], np.int32)
    flag = sets.classify(ids, np.array([sample[-1] for sample in samples], np.int32))
    asked = (flag & (MAYBE_STRING | WITHIN) == MAYBE_STRING).nonzero()[0]
    rows = rows_of([samples[row] for row in asked], [drawn[row][1] for row in asked])
    hits = [sets.find(int(ids[row]), np.array(samples[row], np.int32)) for row in asked]
    assert sets.possible(ids[asked], rows).tolist() == [hit is not None for hit in hits]


def test_stop_prefilter_separates_sets_of_one_and_of_several_strings() -> None:
    sets = StopSets(len(PLAIN), [], PLAIN)
    ids = [sets.acquire(SamplingParams(stop=stops)) for stops in (("ab",), ("bba", "aaab"), ("bb", "ba", "bab"))]
    rows = rows_of([[0, 1], [1, 1], [1, 1, 0], [0, 0, 0], [0, 0], [1, 0]])
    sets_of_rows = np.array([ids[which] for which in (0, 0, 1, 1, 2, 2)], np.int32)
    assert sets.possible(sets_of_rows, rows).tolist() == [True, False, True, False, False, True]


@pytest.mark.parametrize("stop", ["abcdefgh", "xabcdefgh", "uvwxabcdefgh"])
@pytest.mark.parametrize("border", range(1, 12))
def test_stop_prefilter_checks_the_last_eight_bytes_of_long_stops(stop: str, border: int) -> None:
    at = max(len(stop) - border, 1)
    sets = StopSets(5, [], [stop[:at].encode(), stop[at:].encode() + b"!", b"-" + stop[1:at].encode(), b"", b"y"])
    ids = np.full(3, sets.acquire(SamplingParams(stop=(stop,))), np.int32)
    assert sets.find(int(ids[0]), np.array([0, 3, 1], np.int32)) == StopHit(stop, 0)
    if len(stop) - at > 7:
        assert all_flags(sets, int(ids[0]), [1]) == [MAYBE_STRING | WITHIN]
        return
    assert all_flags(sets, int(ids[0]), [1]) == [MAYBE_STRING]
    # A match of only the last eight bytes of a longer stop string has to be searched.
    assert sets.possible(ids, rows_of([[4, 0, 3, 1], [4, 2, 1], [1]])).tolist() == [True, len(stop) > 8, False]


def test_stop_prefilter_keeps_rows_behind_many_tokens_without_bytes() -> None:
    sets = StopSets(3, [], [b"abc", b"", b"d"])
    ids = np.full(3, sets.acquire(SamplingParams(stop=("abcd",))), np.int32)
    rows = rows_of([[0, *[1] * 30, 2], [*[1] * 30, 2], [1, 2]])
    assert sets.possible(ids, rows).tolist() == [True, True, False]
    assert [sets.find(int(ids[0]), rows.tokens[2 - row, : count + 1]) for row, count in enumerate(rows.last)] == [
        StopHit("abcd", 0),
        None,
        None,
    ]


def test_first_ending_then_longest_of_several_stop_strings_is_reported() -> None:
    sets = StopSets(3, [], [b"a", b"bcd", b"x"])
    tokens = np.array([2, 0, 1], np.int32)
    for stops, expected in [
        (("bcd", "ab"), StopHit("ab", 1)),
        (("cd", "abcd", "d"), StopHit("abcd", 1)),
        (("d", "cd"), StopHit("cd", 3)),
    ]:
        assert sets.find(sets.acquire(SamplingParams(stop=stops)), tokens) == expected


@pytest.mark.parametrize("between", [0, 300])
def test_stop_string_of_thousands_of_tokens_is_found(between: int) -> None:
    pieces = [b"a", b"", b"b", b"x"]
    stop = "a" * 2000 + "b"
    sets = StopSets(4, [], pieces)
    set_id = sets.acquire(SamplingParams(stop=(stop,)))
    body = ([0] + [1] * (between // 100)) * 2000
    assert sets.find(set_id, np.array([3, *body, 2], np.int32)) == StopHit(stop, 1)
    assert sets.find(set_id, np.array([*body[1 + between // 100 :], 2], np.int32)) is None


def test_a_special_token_can_be_a_stop_string() -> None:
    tokenizer = tokenizer_of([b"hi", b" a"])
    special = tokenizer.pieces.index(b"<a>")
    sets = StopSets(tokenizer.vocab_size, [], tokenizer.pieces)
    set_id = sets.acquire(SamplingParams(stop=("<a>",)))
    assert flags(sets, set_id, [0, 1, special]) == [0, 0, MAYBE_STRING]
    assert sets.find(set_id, np.array([0, special], np.int32)) == StopHit("<a>", 2)


@pytest.mark.parametrize("hidden", [1, 2, 9])
def test_a_stop_string_is_found_across_special_tokens_that_are_not_shown(hidden: int) -> None:
    tokenizer = tokenizer_of([b"xa", b"by", b"a", b"b"])
    special = tokenizer.pieces.index(b"<a>")
    sets = StopSets(tokenizer.vocab_size, [], tokenizer.pieces, tokenizer.special_ids)
    set_id = sets.acquire(SamplingParams(stop=("ab",)))
    ids = [0, *[special] * hidden, 1]
    assert search(sets, set_id, ids) == (len(ids), StopHit("ab", 1))
    detokeniser = Detokeniser(tokenizer, ["ab"])
    assert [detokeniser.push_one(token) for token in ids] == ["x"] + [""] * (hidden + 1)
    assert detokeniser.finish(1) == ""
    assert search(sets, set_id, [2, special, 0, special]) is None
    assert search(sets, set_id, [2, special, 2, special, 3]) == (5, StopHit("ab", 4))


def test_eos_and_stop_token_ids_are_flagged_by_separate_bits() -> None:
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


def test_equal_stop_sets_share_an_id_until_the_last_release() -> None:
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
def test_stop_set_rows_are_reused_without_mixing_sets(order: list[int], rng: random.Random) -> None:
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


def test_classify_handles_several_stop_sets_in_one_step() -> None:
    sets = StopSets(3, [0], [b"a", b"b", b"c"])
    one = sets.acquire(SamplingParams(stop=("b",)))
    two = sets.acquire(SamplingParams(ignore_eos=True, stop_token_ids=(2,)))
    rows = np.array([one, two, two, one, one], np.int32)
    tokens = np.array([0, 0, 2, 2, 1], np.int32)
    assert sets.classify(rows, tokens).tolist() == [END, 0, STOP_ID, 0, MAYBE_STRING | WITHIN]


@pytest.mark.parametrize(
    ("params", "pieces", "message"),
    [
        (SamplingParams(stop=("a",)), None, "^stop is .*no tokenizer"),
        (SamplingParams(stop_token_ids=(4,)), [b"a"], "^stop_token_ids is 4; allowed: ids from 0 to 3"),
    ],
)
def test_invalid_stops_are_rejected_and_acquire_no_stop_set(
    params: SamplingParams, pieces: list[bytes] | None, message: str
) -> None:
    sets = StopSets(4, [3], pieces)
    with pytest.raises(InvalidField, match=message):
        sets.acquire(params)
    assert flags(sets, sets.acquire(SamplingParams()), [0, 1, 2, 3]) == [0, 0, 0, END]
