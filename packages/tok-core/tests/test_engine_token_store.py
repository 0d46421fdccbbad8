"""TokenStore returns the tokens written to each sample, while other requests open and close."""

from __future__ import annotations

import threading

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tok_core.engine.token_store import BLOCK_TOKENS, TokenStore

SEEDS = st.integers(0, 2**32 - 1)


def report(token_store: TokenStore, rows: list[tuple[int, int]], tokens: np.ndarray) -> list[int]:
    """Append one token to each `(rid, sample)`."""
    rids = sorted({rid for rid, _ in rows})
    which = np.array([rids.index(rid) for rid, _ in rows], np.int64)
    return token_store.append(rids, which, np.array([sample for _, sample in rows], np.int32), tokens)


class Model(RuleBasedStateMachine):
    """A TokenStore beside a dictionary of lists."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = TokenStore()
        self.open: dict[int, dict[int, list[int]]] = {}
        self.next_rid = 1

    @rule(samples=st.integers(1, 100))
    def opens(self, samples: int) -> None:
        self.ledger.open(self.next_rid, samples)
        self.open[self.next_rid] = {sample: [] for sample in range(samples)}
        self.next_rid += 1

    @rule(seed=SEEDS, steps=st.integers(1, 2 * BLOCK_TOKENS))
    def appends(self, seed: int, steps: int) -> None:
        rng = np.random.default_rng(seed)
        rows = [(rid, sample) for rid, samples in self.open.items() for sample in samples if rng.random() < 0.5]
        rows += [(self.next_rid + 5, 0)]  # not an open request
        rng.shuffle(rows)
        for _ in range(steps):
            begun = {rid for rid, sample in rows if rid in self.open and not self.open[rid][sample]}
            tokens = rng.integers(0, 1 << 30, len(rows)).astype(np.int32)
            assert set(report(self.ledger, rows, tokens)) == begun
            for (rid, sample), token in zip(rows, tokens.tolist(), strict=True):
                if rid in self.open:
                    self.open[rid][sample].append(token)

    @rule(seed=SEEDS)
    def takes(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for rid, samples in self.open.items():
            for sample in list(samples):
                if rng.random() < 0.3:
                    assert self.ledger.take(rid, sample).tolist() == samples[sample]
                    samples[sample] = []

    @rule(seed=SEEDS)
    def reads_and_drops(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        every = [(rid, sample) for rid, samples in self.open.items() for sample in samples]
        wanted = [one for one in every if rng.random() < 0.3] + [(self.next_rid + 6, 0)]  # not an open request
        rng.shuffle(wanted)
        known, tokens, counts = self.ledger.read([rid for rid, _ in wanted], [sample for _, sample in wanted])
        assert [place for place, (rid, _) in enumerate(wanted) if rid in self.open] == known
        ends = np.cumsum(counts).tolist()
        for place, first, end in zip(known, [0, *ends], ends, strict=False):
            rid, sample = wanted[place]
            assert tokens[first:end].tolist() == self.open[rid][sample]
        for rid, samples in self.open.items():
            dropped = [sample for one, sample in wanted if one == rid and rng.random() < 0.5]
            self.ledger.drop(rid, dropped)
            samples.update((sample, []) for sample in dropped)

    @rule(seed=SEEDS, together=st.booleans())
    def closes(self, seed: int, together: bool) -> None:
        rng = np.random.default_rng(seed)
        closed = [rid for rid in self.open if rng.random() < 0.4]
        if together:
            self.ledger.close_all([*closed, self.next_rid + 7])
        else:
            for rid in [*closed, self.next_rid + 7]:
                self.ledger.close(rid)
        for rid in closed:
            del self.open[rid]

    @invariant()
    def holds_no_more_than_it_must(self) -> None:
        tokens = [len(tokens) for samples in self.open.values() for tokens in samples.values()]
        assert self.ledger.blocks_used == sum(-(-count // BLOCK_TOKENS) for count in tokens)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=25, stateful_step_count=12, deadline=None)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=30))
def test_token_store_reuses_rows_of_closed_requests(sizes: list[int]) -> None:
    token_store = TokenStore()
    token_store.open(0, 3)
    report(token_store, [(0, 2)], np.array([7], np.int32))
    for rid in range(1, 200):
        token_store.open(rid, sizes[rid % len(sizes)])
        token_store.close(rid)
    assert len(token_store._count) <= 2 * (3 + max(sizes)) + 64
    assert token_store.take(0, 2).tolist() == [7]


def test_token_store_keeps_tokens_when_other_requests_close() -> None:
    token_store = TokenStore()
    for rid in range(100):
        token_store.open(rid, 4)
    rows = [(rid, sample) for rid in range(100) for sample in range(4)]

    def close_half() -> None:
        for rid in range(0, 100, 2):
            token_store.close(rid)

    closing = threading.Thread(target=close_half)
    for step in range(300):
        report(token_store, rows, np.arange(400, dtype=np.int32) + step)
        if step == 100:
            closing.start()
    closing.join()
    for rid in range(1, 100, 2):
        assert token_store.take(rid, 3).tolist() == [4 * rid + 3 + step for step in range(300)]
