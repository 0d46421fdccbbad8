"""Tests of n-gram lookup and of accepted drafts, by Triton and by the reference."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from support.interpreted import outside, rerun
from tok_kernels import Backend, DraftRows, NgramTable, SlotColumns
from tok_kernels.backends.reference import ReferenceBackend
from tok_kernels.backends.triton import TritonBackend
from tok_kernels.ngrams.table import COUNT_SHIFT, MAX_COUNT, TOKEN_BITS

SLOTS, PAGE = 9, 4
END = 6
TEXT = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22]


@outside
def test_the_tests_of_this_file_pass_under_the_interpreter() -> None:
    rerun(__file__)


@dataclass
class Drafting:
    """A backend with slots and a table of its own."""

    backend: Backend
    slots: SlotColumns
    ngrams: NgramTable

    @property
    def device(self) -> torch.device:
        return self.slots.length.device

    def ints(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def write(self, slot: int, *tokens: int) -> None:
        """Make all tokens but the last one the cached tokens of a slot."""
        for position, token in enumerate(tokens[:-1]):
            page = int(self.slots.page_table[slot, position // PAGE])
            self.slots.token_of[page * PAGE + position % PAGE] = token
        self.slots.length[slot], self.slots.last_token[slot] = len(tokens) - 1, tokens[-1]

    def learn(self, slot: int, *tokens: int) -> int:
        """Write all tokens to a slot and learn them; return how many were predicted."""
        self.write(slot, *tokens, 0)
        count = len(tokens)
        return int(self.backend.learn_tokens(self.ints(slot), self.ints(count), count, self.slots, self.ngrams))

    def predict(self, slot: int, count: int, *tokens: int) -> list[int]:
        """Write tokens to a slot and return `count` predicted tokens."""
        self.write(slot, *tokens)
        predicted: list[int] = self.backend.predict_tokens(self.ints(slot), count, self.slots, self.ngrams)[0].tolist()
        return predicted

    def accept(self, slot: int, lent: list[int], draft: list[int]) -> int:
        """Accept a draft of a sequence in decode row 0; return how many tokens are accepted."""
        row = [i if lent_slot >= 0 else -1 for i, lent_slot in enumerate([0, *lent])]
        drafts = DraftRows(self.ints(slot, *lent)[:, None], self.ints(*row)[:, None], self.ints(-1, *draft)[:, None])
        draft_kn, count_B = torch.tensor(draft, device=self.device)[:, None], self.ints(*(7 for _ in range(9)))
        accepted = int(self.backend.accept_drafts(drafts, draft_kn, count_B, self.slots))
        rows = sum(one >= 0 for one in row)
        assert count_B.tolist() == [1 + accepted, *[0] * (rows - 1), *[7] * (9 - rows)]
        return accepted

    def slot(self, slot: int) -> tuple[int, int, int]:
        columns = self.slots.length, self.slots.last_token, self.slots.ended
        length, last_token, ended = (int(column[slot]) for column in columns)
        return length, last_token, ended

    def tables(self) -> list[Tensor]:
        return [self.ngrams.pair_count.cpu(), self.ngrams.total.cpu(), self.ngrams.best.cpu()]

    def columns(self) -> list[Tensor]:
        return [self.slots.length.cpu(), self.slots.last_token.cpu(), self.slots.ended.cpu()]


def draftings(
    seed: int, device: torch.device, *, tokens: int = 5, pages_each: int = 6, salts: int = 2, entry_bits: int = 8
) -> tuple[Drafting, Drafting]:
    """Return the reference and Triton with equal slots of random lengths and tokens, on random pages.

    A third of the slots have ended. There are `tokens` different tokens and `salts` different salts.
    """
    source = torch.Generator().manual_seed(seed)

    def whole(high: int, *size: int) -> Tensor:
        return torch.randint(high, size, generator=source)

    pages = torch.randperm(SLOTS * pages_each, generator=source).int()
    slots = SlotColumns(
        last_token=whole(tokens, SLOTS),
        length=whole(pages_each * PAGE + 1, SLOTS),
        ended=(whole(3, SLOTS) == 0).int(),
        eos_from_position=torch.zeros(SLOTS, dtype=torch.int64),
        page_table=pages.view(SLOTS, pages_each),
        token_of=whole(tokens, len(pages) * PAGE + 1),
        end_ids=torch.tensor([END]),
        seed=torch.zeros(SLOTS, dtype=torch.int64),
        sample=torch.zeros(SLOTS, dtype=torch.int64),
        temperature=torch.zeros(SLOTS),
        page_size=PAGE,
        scratch=len(pages) * PAGE,
    )
    salt = (whole(1 << 62, salts) - (1 << 61))[whole(salts, SLOTS)] * 3  # of either sign, up to 62 bits
    cpu = torch.device("cpu")
    return (
        Drafting(ReferenceBackend(), on(cpu, slots), NgramTable.empty(salt, entry_bits)),
        Drafting(TritonBackend(), on(device, slots), NgramTable.empty(salt.to(device), entry_bits)),
    )


def on(device: torch.device, slots: SlotColumns) -> SlotColumns:
    values = ((one.name, getattr(slots, one.name)) for one in fields(slots))
    tensors: dict[str, Any] = {name: x.clone().to(device) for name, x in values if isinstance(x, Tensor)}
    return replace(slots, **tensors)


def running(device: torch.device) -> tuple[Drafting, Drafting]:
    """Return draftings of one salt without ended slots, whose table keeps all contexts of a test apart."""
    both = draftings(0, device, salts=1, entry_bits=16)
    for one in both:
        one.slots.ended.zero_()
    return both


def check_equal(expected: list[Tensor], got: list[Tensor]) -> None:
    for wanted, computed in zip(expected, got, strict=True):
        assert wanted.dtype == computed.dtype
        assert torch.equal(wanted, computed.cpu())


def check_learning(both: tuple[Drafting, Drafting], slot: Tensor, count: Tensor, max_count: int) -> Tensor:
    """Check that both backends learn the same; return the counts of right predictions."""
    right = []
    for one in both:
        here = slot.to(one.device), count.to(one.device), max_count
        right.append(one.backend.learn_tokens(*here, one.slots, one.ngrams))
    check_equal(right[:1], right[1:])
    check_equal(both[0].tables(), both[1].tables())
    check_equal(both[0].columns(), both[1].columns())
    return right[0]


@given(
    seed=st.integers(0, 2**20),
    tokens=st.sampled_from([2, 20]),
    salts=st.sampled_from([1, 2, 100]),
    aged=st.booleans(),
)
def test_triton_learns_and_predicts_exactly_as_the_reference_does(
    device: torch.device, seed: int, tokens: int, salts: int, aged: bool
) -> None:
    both = draftings(seed, device, tokens=tokens, salts=salts)
    source = torch.Generator().manual_seed(seed)
    for turn in range(3):
        slot = torch.randperm(SLOTS, generator=source)[: (seed + turn * 4) % (SLOTS + 1)].int()
        count = (torch.rand(len(slot), generator=source) * (both[0].slots.length[slot] + 1)).int()
        check_learning(both, slot, count, max(count.tolist(), default=0) + turn)
        drafts = [one.backend.predict_tokens(slot.to(one.device), seed % 9, one.slots, one.ngrams) for one in both]
        check_equal(drafts[:1], drafts[1:])
        if aged:
            for one in both:
                one.ngrams.age()
            check_equal(both[0].tables(), both[1].tables())


@pytest.mark.parametrize("pages_each", [1, 400])
def test_tokens_that_share_contexts_are_all_counted(device: torch.device, pages_each: int) -> None:
    both = draftings(1, device, tokens=3, pages_each=pages_each, salts=1)
    for one in both:
        one.slots.ended.zero_()
        one.slots.length.fill_(pages_each * PAGE)
    slot = torch.arange(SLOTS).int()
    check_learning(both, slot, torch.full((SLOTS,), pages_each * PAGE).int(), pages_each * PAGE)
    known = SLOTS * sum(pages_each * PAGE - length for length in (1, 2, 4, 8) if length < pages_each * PAGE)
    for one in both:
        assert int(one.ngrams.pair_count.sum()) == int(one.ngrams.total.sum()) == known


@given(seed=st.integers(0, 2**20), order=st.permutations(range(SLOTS)))
def test_the_order_of_slots_in_a_call_changes_nothing(device: torch.device, seed: int, order: list[int]) -> None:
    for ordered, permuted in zip(draftings(seed, device), draftings(seed, device), strict=True):
        for one, slots in ((ordered, list(range(SLOTS))), (permuted, order)):
            count = one.slots.length[slots].int()
            one.backend.learn_tokens(one.ints(*slots), count, int(count.max()), one.slots, one.ngrams)
        check_equal(ordered.tables(), permuted.tables())


def test_a_repeated_text_is_predicted(device: torch.device) -> None:
    for one in running(device):
        assert one.predict(0, 3, *TEXT[:3]) == [-1, -1, -1]
        assert one.learn(0, *TEXT) == 0
        assert one.predict(1, 5, 99, TEXT[2]) == TEXT[3:8]
        assert one.predict(1, 3, TEXT[0]) == TEXT[1:4]
        assert one.learn(2, *TEXT) == len(TEXT) - 1  # all but the first


def test_predictions_end_before_the_first_unknown_token(device: torch.device) -> None:
    for one in running(device):
        one.learn(0, *TEXT)
        assert one.predict(1, 4, *TEXT[:-2]) == [*TEXT[-2:], -1, -1]
        assert one.predict(1, 2, 99) == [-1, -1]


def test_slots_of_different_salts_learn_nothing_from_each_other(device: torch.device) -> None:
    for one in running(device):
        one.ngrams.salt[1] = -7
        one.learn(0, *TEXT)
        assert one.predict(1, 2, *TEXT[:4]) == [-1, -1]
        assert one.learn(1, *TEXT[4:], *TEXT[:4]) == 0
        assert one.predict(1, 2, TEXT[-1]) == TEXT[:2]
        assert one.predict(0, 2, TEXT[-1]) == [-1, -1]


def test_the_context_with_the_greater_share_decides(device: torch.device) -> None:
    for one in running(device):
        one.learn(0, 7, 1, 2)
        one.learn(0, 8, 1, 3)
        one.learn(0, 9, 1, 2)
        # After 1, token 2 has the share 2 / 4; after 8 and 1, token 3 has the equal share 1 / 2.
        assert one.predict(1, 1, 8, 1) == [3]
        one.learn(0, 9, 1, 2)
        assert one.predict(1, 1, 8, 1) == [2]


def test_only_the_last_tokens_of_a_slot_are_learned(device: torch.device) -> None:
    for one in running(device):
        one.write(0, *TEXT, 0)
        right = one.backend.learn_tokens(one.ints(0, 1), one.ints(2, 0), 4, one.slots, one.ngrams)
        assert right.tolist() == [0, 0]
        assert one.predict(1, 1, TEXT[-4]) == [-1]
        assert one.predict(1, 2, TEXT[-3]) == TEXT[-2:]
        assert int(one.ngrams.total.sum()) == 2 * 4


def test_an_ended_slot_learns_nothing(device: torch.device) -> None:
    for one in running(device):
        one.learn(0, *TEXT)
        before = one.tables()
        one.slots.ended[0] = 1
        assert one.learn(0, *TEXT) == 0
        check_equal(before, one.tables())


def test_age_forgets_what_was_seen_once_and_keeps_the_rest(device: torch.device) -> None:
    for one in running(device):
        one.learn(0, *TEXT[:4])
        for _ in range(2):
            one.learn(0, *TEXT[6:])
        one.ngrams.age()
        assert one.predict(1, 1, TEXT[0]) == [-1]
        assert one.predict(1, 2, TEXT[6]) == TEXT[7:9]
        one.ngrams.age()
        assert not any(x.any() for x in one.tables())


def test_counts_and_tokens_of_the_largest_size_stay_apart(device: torch.device) -> None:
    largest = (1 << TOKEN_BITS) - 1
    for one in running(device):
        one.ngrams.pair_count.fill_(MAX_COUNT)
        one.learn(0, 1, largest)
        assert one.predict(1, 1, 1) == [largest]
        assert int(one.ngrams.best.max()) >> COUNT_SHIFT == MAX_COUNT


@given(seed=st.integers(0, 2**20), order=st.permutations(range(SLOTS)), length=st.integers(0, 4))
def test_triton_accepts_drafts_as_the_reference_does(
    device: torch.device, seed: int, order: list[int], length: int
) -> None:
    source = torch.Generator().manual_seed(seed)
    rows = SLOTS // (length + 1) if length else seed % SLOTS
    drafts_1kn = random_drafts(order, rows, length, source)
    draft_kn = torch.randint(2, (length, rows), generator=source)
    both, results = draftings(seed, device, tokens=2), []
    for one in both:
        drafts, count_B = DraftRows(*drafts_1kn.to(one.device)), one.ints(*range(SLOTS))
        accepted = one.backend.accept_drafts(drafts, draft_kn.to(one.device), count_B, one.slots)
        results.append([accepted, count_B])
    check_equal(*results)
    check_equal(both[0].columns(), both[1].columns())


@given(seed=st.integers(0, 2**20), order=st.permutations(range(SLOTS)), length=st.integers(0, 4))
def test_triton_drafts_tokens_as_the_reference_does(
    device: torch.device, seed: int, order: list[int], length: int
) -> None:
    source = torch.Generator().manual_seed(seed)
    drafts_1kn = random_drafts(order, SLOTS // (length + 1), length, source)
    both, results = draftings(seed, device, tokens=3), []
    for one in both:
        one.backend.learn_tokens(*(one.ints(*range(SLOTS)), one.slots.length[:SLOTS].int(), 99), one.slots, one.ngrams)
        draft_kn = one.backend.draft_tokens(DraftRows(*drafts_1kn.to(one.device)), one.slots, one.ngrams)
        assert draft_kn.dtype == torch.int64
        results.append([torch.where(drafts_1kn[0, 1:] >= 0, draft_kn.cpu(), 0)])
    check_equal(*results)
    is_given = (drafts_1kn[2, 1:] >= 0) & (drafts_1kn[0, 1:] >= 0)
    assert torch.equal(results[0][0][is_given], drafts_1kn[2, 1:][is_given].long())


def random_drafts(order: list[int], sequences: int, length: int, source: torch.Generator) -> Tensor:
    """Return the fields of DraftRows for up to `length` tokens of each sequence; the last sequence is padding."""
    slot = torch.tensor(order[: sequences * (length + 1)]).view(1 + length, sequences)
    count = torch.randint(length + 1, (sequences,), generator=source)
    given = torch.where(torch.rand(slot.shape, generator=source) < 0.3, 5 + slot, -1)
    drafts = torch.stack((slot, torch.randperm(SLOTS, generator=source)[: slot.numel()].view_as(slot), given))
    drafts[:, 1:][:, torch.arange(length)[:, None] >= count] = -1
    if sequences:
        drafts[1, 0, -1], drafts[:, 1:, -1] = -1, -1
    return drafts.int()


def test_a_draft_is_accepted_up_to_its_first_wrong_token(device: torch.device) -> None:
    for one in running(device):
        one.slots.length[:4] = torch.tensor([10, 11, 12, 13])
        one.slots.last_token[:4] = torch.tensor([50, 51, 52, 53])  # sampled after the last token, and after each draft
        assert one.accept(0, [1, 2, 3], [50, 51, 99]) == 2
        assert one.slot(0) == (12, 52, 0)
        assert one.slot(3) == (13, 53, 0)
        assert one.accept(1, [2, 3, -1], [99, 52, 53]) == 0
        assert one.slot(1) == (11, 51, 0)
        assert one.accept(1, [3, -1, -1], [51, 53, 53]) == 1
        assert one.slot(1) == (12, 53, 0)


def test_no_drafted_token_is_accepted_after_an_end_id(device: torch.device) -> None:
    for one in running(device):
        one.slots.length[:4] = torch.tensor([10, 11, 12, 13])
        one.slots.last_token[:4] = torch.tensor([50, END, 52, 53])
        one.slots.ended[1] = 1
        assert one.accept(0, [1, 2, 3], [50, END, 52]) == 1
        assert one.slot(0) == (11, END, 1)


def test_a_slot_that_has_ended_accepts_no_draft(device: torch.device) -> None:
    for one in running(device):
        one.slots.length[:2] = torch.tensor([10, 11])
        one.slots.last_token[:2] = torch.tensor([50, 51])
        one.slots.ended[0] = 1
        assert one.accept(0, [1], [50]) == 0
        assert one.slot(0) == (10, 50, 1)


def test_no_sequences_or_no_tokens_give_empty_results(device: torch.device) -> None:
    for one in running(device):
        learn, predict, accept = one.backend.learn_tokens, one.backend.predict_tokens, one.backend.accept_drafts
        none, two = one.ints(), one.ints(0, 1)
        before = one.tables()
        assert learn(none, none, 0, one.slots, one.ngrams).tolist() == []
        assert learn(two, one.ints(0, 0), 0, one.slots, one.ngrams).tolist() == [0, 0]
        check_equal(before, one.tables())
        assert predict(none, 3, one.slots, one.ngrams).shape == (0, 3)
        assert predict(two, 0, one.slots, one.ngrams).shape == (2, 0)
        for slot in (none, two):
            drafts = DraftRows(slot[None], slot[None], slot[None])
            draft_kn, count_B = one.backend.draft_tokens(drafts, one.slots, one.ngrams), one.ints(7, 7)
            assert draft_kn.shape == (0, len(slot))
            assert accept(drafts, draft_kn, count_B, one.slots).tolist() == [0] * len(slot)
            assert count_B.tolist() == [1, 1][: len(slot)] + [7, 7][len(slot) :]
