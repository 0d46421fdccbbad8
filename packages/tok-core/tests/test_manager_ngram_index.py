"""The n-gram index predicts as a plain dictionary does that works through the same tokens one by one."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from support.schedules import SMALL
from tok_core.manager.kv_cache import Paging
from tok_core.manager.sequences import SequenceTable
from tok_core.manager.speculation import HostSpeculator
from tok_core.manager.speculation.ngram_index import MAX_CONTEXT, NO_TOKEN, NgramIndex, Predictions, UInt64
from tok_core.messages import Int32

LENGTHS = (1, 2, 4, 8)
MASK = (1 << 64) - 1
Context = tuple[int, ...]


class Oracle:
    """The index in plain Python: entries `[context, token, count]` in a dictionary by number of the entry."""

    def __init__(self, entry_bits: int) -> None:
        self.bits = entry_bits
        self.entries: dict[int, tuple[tuple[int, Context], int, int]] = {}

    def number(self, family: int, context: Context) -> int:
        """Return the entry of a context, whose last token comes first, by the hash function that the index defines."""
        golden = 0x9E3779B97F4A7C15
        state = family + sum(token % 2**64 * pow(golden, i + 2, 1 << 64) for i, token in enumerate(context))
        state = ((state & MASK) ^ (0xD1B54A32D192ED03 * len(context) & MASK)) * golden & MASK
        return (state ^ state >> 32) >> (64 - self.bits)

    def add(self, learnt: list[tuple[int, Context, int]]) -> None:
        """Add families, windows and tokens, which do not see each other."""
        seen = dict(self.entries)
        for length, (family, window, token) in product(LENGTHS, learnt):
            context = window[:length]
            at = self.number(family, context)
            held, known, count = seen.get(at, ((0, ()), 0, 0))
            if held != (family, context):
                count = 0
            if count and known == token:
                self.entries[at] = ((family, context), token, min(count + 2, 15))
            elif count > 1:
                self.entries[at] = ((family, context), known, count - 1)
            else:
                self.entries[at] = ((family, context), token, 1)

    def predict(self, family: int, window: Context) -> int:
        best, found = 0, NO_TOKEN
        for bonus, length in enumerate(LENGTHS):
            held, token, count = self.entries.get(self.number(family, window[:length]), ((0, ()), 0, 0))
            if count and held == (family, window[:length]) and count + bonus > best:
                best, found = count + bonus, token
        return found


def window_of(tokens: list[int]) -> Context:
    return tuple(([NO_TOKEN] * MAX_CONTEXT + tokens)[: -MAX_CONTEXT - 1 : -1])


def columns(windows: list[Context]) -> Int32:
    return np.array(windows, np.int32).reshape(-1, MAX_CONTEXT)[:, ::-1].T


texts = st.lists(st.integers(0, 3), min_size=1, max_size=30)


@given(
    bits=st.sampled_from([3, 6, 20]),
    prompts=st.lists(texts, min_size=1, max_size=3),
    rounds=st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=4), max_size=25),
)
def test_index_equals_a_dictionary(bits: int, prompts: list[list[int]], rounds: list[list[tuple[int, int]]]) -> None:
    index, oracle = NgramIndex(bits), Oracle(bits)
    sequences = [(family, list(prompt)) for family, prompt in enumerate(prompts, 2**63)]
    for family, prompt in sequences:
        index.add_text(family, np.array(prompt, np.int32))
        oracle.add([(family, window_of(prompt[:i]), prompt[i]) for i in range(1, len(prompt))])
    for one in rounds:
        chosen = [(*sequences[number % len(sequences)], token) for number, token in one]
        families = np.array([family for family, _, _ in chosen], np.uint64)
        windows = [window_of(tokens) for _, tokens, _ in chosen]
        index.add(families, columns(windows), np.array([token for _, _, token in chosen], np.int32))
        oracle.add([(family, window, token) for (family, _, token), window in zip(chosen, windows, strict=True)])
        for _, tokens, token in chosen:
            tokens.append(token)
    families = np.array([family for family, _ in sequences], np.uint64)
    drafts = index.draft(families, columns([window_of(tokens) for _, tokens in sequences]), 5)
    for draft, (family, tokens) in zip(drafts.token.tolist(), sequences, strict=True):
        wanted = list[int]()
        while len(wanted) < 5 and (token := oracle.predict(family, window_of(tokens + wanted))) != NO_TOKEN:
            wanted.append(token)
        assert draft == wanted + [NO_TOKEN] * (5 - len(wanted))
    assert len(oracle.entries) <= 1 << bits


def test_drafts_repeat_a_text_after_its_first_words() -> None:
    index, text = NgramIndex(), np.arange(100, 140, dtype=np.int32)
    index.add_text(7, text)
    window = columns([window_of(text[:12].tolist())])
    assert index.draft(np.array([7], np.uint64), window, 6).token.tolist() == [text[12:18].tolist()]
    assert index.draft(np.array([8], np.uint64), window, 6).token.tolist() == [[NO_TOKEN] * 6]


def test_token_that_follows_most_often_is_predicted() -> None:
    index = NgramIndex()
    index.add_text(7, np.array([1, 2, 9, 1, 2, 8, 1, 2, 7, 1], np.int32))
    family, window = np.array([7], np.uint64), columns([window_of([5, 6, 1])])
    for _ in range(2):
        index.add(family, window, np.array([2], np.int32))
    for token in (3, 4):
        index.add(family, window, np.array([token], np.int32))
    assert index.draft(family, window, 1).token.tolist() == [[2]]


def test_step_of_very_many_rows_is_learned_in_part() -> None:
    table = SequenceTable(max_running=3000, max_len=16, page_size=16)
    speculator, learnt = HostSpeculator(Paging(table, 1), 4, SMALL), list[int]()
    add = speculator.index.add

    def counted(family: UInt64, windows: Int32, token: Int32) -> Predictions:
        learnt.append(len(token))
        return add(family, windows, token)

    setattr(speculator.index, "add", counted)  # noqa: B010
    for rows in (0, 1, 1024, 1025, 3000, 1, 2, 0):  # nothing is drafted: the last four are learned together
        table.known[:rows] = 2
        speculator.note(np.arange(rows), table.known[:rows])
        speculator.learn(np.arange(0), in_flight=0)
        speculator.add_to_index()
    assert learnt == [0, 1, 1024, 513, 1003]
