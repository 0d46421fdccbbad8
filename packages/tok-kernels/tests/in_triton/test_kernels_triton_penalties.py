"""Tests of Triton penalties against the reference, over contexts of any content and length."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from support.contexts import contexts_of
from support.interpreted import INTERPRETING, outside, rerun
from tok_kernels import Penalties
from tok_kernels.sampling.reference.edits import apply_penalties as apply_penalties_by_reference
from tok_kernels.sampling.triton import penalties as triton_penalties
from tok_kernels.sampling.triton.penalties import BLOCK, apply_penalties

INF = torch.inf
CUDA = torch.device("cuda")
VOCABULARY = 700
# (prompt tokens, generated tokens): none, one, less than a block, exactly one block, several, and either alone.
LENGTHS = [
    (0, 0),
    (1, 0),
    (0, 1),
    (30, 20),
    (BLOCK, BLOCK),
    (3 * BLOCK - 5, 40),
    (9, 2 * BLOCK + 1),
    (200, 600),
    (0, 900),
]
# presence, frequency, repetition
ASKED = [(0.7, 0.0, 1.0), (0.0, 0.3, 1.0), (0.0, 0.0, 1.3), (0.7, 0.3, 1.3), (-0.5, -0.2, 0.8), (0.0, 0.0, 1.0)]

pytestmark = pytest.mark.filterwarnings("ignore:.*invalid value encountered:RuntimeWarning")


@outside
def test_the_tests_of_this_file_pass_under_the_interpreter() -> None:
    rerun(__file__)


def logits_of(rows: int, device: torch.device, vocabulary: int = VOCABULARY) -> Tensor:
    source = torch.Generator().manual_seed(rows)
    return (torch.randn((rows, vocabulary), generator=source) * 3).to(device)


def penalties_of(
    lengths: list[tuple[int, int]],
    asked: list[tuple[float, float, float]],
    device: torch.device,
    *,
    tokens: int = VOCABULARY,
    page_size: int = 4,
    more: int = 0,
) -> Penalties:
    """Return penalties of rows whose random contexts repeat many of the first `tokens` ids of the vocabulary."""
    source = np.random.default_rng(len(lengths))
    prompts, generated = ([source.integers(0, tokens, one[i]).tolist() for one in lengths] for i in range(2))
    contexts = contexts_of(prompts, generated, device, page_size=page_size, more=more)
    columns = torch.tensor(asked, device=device).view(-1, 3).T
    return Penalties(torch.arange(len(lengths), device=device), contexts, *columns)


def assert_as_in_the_reference(logits: Tensor, penalties: Penalties) -> None:
    expected, rows = logits.clone(), penalties.rows
    apply_penalties_by_reference(expected, penalties)
    apply_penalties(logits, penalties, torch.arange(len(rows), device=rows.device))
    # The kernel subtracts a frequency penalty once per occurrence, up to a thousand times, and rounds each time.
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("asked", ASKED)
def test_each_penalty_alone_and_combined_equals_the_reference(
    asked: tuple[float, float, float], device: torch.device
) -> None:
    logits = logits_of(len(LENGTHS), device)
    kept = logits.clone()
    assert_as_in_the_reference(logits, penalties_of(LENGTHS, [asked] * len(LENGTHS), device))
    assert torch.equal(logits[0], kept[0])
    assert torch.equal(logits, kept) == (asked == (0.0, 0.0, 1.0))


@pytest.mark.parametrize(("tokens", "page_size", "more"), [(1, 16, 0), (33, 1, 1), (VOCABULARY, 64, 3 * BLOCK)])
def test_rows_with_different_penalties_in_one_launch_equal_the_reference(
    tokens: int, page_size: int, more: int, device: torch.device
) -> None:
    lengths = LENGTHS[3:]
    penalties = penalties_of(lengths, ASKED, device, tokens=tokens, page_size=page_size, more=more)
    assert_as_in_the_reference(logits_of(len(lengths), device), penalties)


def test_penalties_of_several_blocks_per_program_equal_the_reference(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, asked = [(2 * BLOCK, 3 * BLOCK + 7), (100, 4 * BLOCK)], [(0.5, 0.25, 1.5)] * 2
    for programs in (1, 4):
        monkeypatch.setattr(triton_penalties, "_TARGET_PROGRAMS", programs)
        assert_as_in_the_reference(logits_of(2, device), penalties_of(lengths, asked, device))


def test_penalties_change_only_the_rows_that_request_them(device: torch.device) -> None:
    penalties = penalties_of([(30, 20), (10, 90)], [(0.5, 0.25, 1.5), (0.0, 0.0, 2.0)], device)
    raw = logits_of(4, device)
    logits, expected = raw.clone(), raw.clone()
    apply_penalties(logits, penalties, torch.tensor([1, -1, -1, 0], device=device))
    apply_penalties_by_reference(expected, replace(penalties, rows=torch.tensor([3, 0], device=device)))
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-5)
    assert torch.equal(logits[1:3], raw[1:3])


def test_penalties_keep_tokens_at_minus_infinity(device: torch.device) -> None:
    penalties = penalties_of([(300, 300)], [(-2.0, -2.0, 0.5)], device, tokens=50)
    logits = logits_of(1, device)
    logits[:, :50:2] = -INF
    assert_as_in_the_reference(logits, penalties)
    assert (logits[:, :50:2] == -INF).all()


def test_penalties_of_empty_batches_and_contexts_change_nothing(device: torch.device) -> None:
    apply_penalties(
        logits_of(0, device), penalties_of([], [], device), torch.zeros(0, dtype=torch.int64, device=device)
    )
    logits, penalties = logits_of(2, device), penalties_of([(0, 0), (0, 0)], [(1.0, 1.0, 2.0)] * 2, device)
    assert penalties.contexts.max_len == 0
    assert_as_in_the_reference(logits, penalties)
    assert torch.equal(logits, logits_of(2, device))


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETING, reason="of a device")
def test_penalties_are_deterministic() -> None:
    rows, lengths = 200, [(1000, 3000)] * 200
    penalties = penalties_of(lengths, [(0.3, 0.1, 1.1)] * rows, CUDA, tokens=500, page_size=16)
    found = []
    for _ in range(5):
        found.append(logits_of(rows, CUDA, 50_257))
        apply_penalties(found[-1], penalties, penalties.rows)
    assert all(torch.equal(found[0], other) for other in found[1:])
    expected = logits_of(rows, CUDA, 50_257)
    apply_penalties_by_reference(expected, penalties)
    torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-4)
