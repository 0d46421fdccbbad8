"""Tests of `merge_states`, which merges partial attention results by log-sum-exp."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.noise import noise
from tok_kernels import merge_states

seeds = st.integers(0, 2**31)


def attend(score: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return score.softmax(-1) @ value, score.logsumexp(-1)


@settings(max_examples=50, deadline=None)
@given(seed=seeds, keys=st.integers(2, 40), cut=st.floats(0, 1), spread=st.sampled_from([0.1, 1.0, 30.0]))
def test_merge_states_of_two_key_ranges_equals_full_attention(
    seed: int, keys: int, cut: float, spread: float, device: torch.device
) -> None:
    source = torch.Generator().manual_seed(seed)
    score = torch.randn((5, 3, keys), generator=source, dtype=torch.float64).to(device) * spread
    value = torch.randn((5, keys, 8), generator=source, dtype=torch.float64).to(device)
    middle = 1 + int(cut * (keys - 2))
    parts = (attend(score[..., :middle], value[:, :middle]), attend(score[..., middle:], value[:, middle:]))
    whole = attend(score, value)
    torch.testing.assert_close(merge_states(*parts[0], *parts[1]), whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(merge_states(*parts[1], *parts[0]), whole, rtol=0, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(seed=seeds)
def test_merge_states_is_associative(seed: int, device: torch.device) -> None:
    source = torch.Generator().manual_seed(seed)
    out = torch.randn((3, 7, 4), generator=source, dtype=torch.float64).to(device)
    lse = torch.randn((3, 7), generator=source, dtype=torch.float64).to(device) * 20
    left = merge_states(*merge_states(out[0], lse[0], out[1], lse[1]), out[2], lse[2])
    right = merge_states(out[0], lse[0], *merge_states(out[1], lse[1], out[2], lse[2]))
    torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("content", [0.0, 5.0, torch.nan, torch.inf])
def test_merge_states_ignores_the_contents_of_an_empty_state(content: float, device: torch.device) -> None:
    out, lse = noise(4, 8, device=device), noise(4, device=device)
    nothing = torch.full_like(out, content), torch.full_like(lse, -torch.inf)
    for merged in (merge_states(out, lse, *nothing), merge_states(*nothing, out, lse)):
        assert torch.equal(merged[0], out)
        torch.testing.assert_close(merged[1], lse)


def test_merge_states_of_two_empty_states_is_empty(device: torch.device) -> None:
    nothing = torch.full((4, 8), torch.nan, device=device), torch.full((4,), -torch.inf, device=device)
    out, lse = merge_states(*nothing, *nothing)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, nothing[1])


def test_merge_states_of_far_apart_lse_does_not_overflow(device: torch.device) -> None:
    one, lse = torch.ones((2, 4), device=device), torch.tensor([1e4, -1e4], device=device)
    out, merged = merge_states(one, lse, 3 * one, -lse)
    torch.testing.assert_close(out, torch.stack((one[0], 3 * one[0])))
    torch.testing.assert_close(merged, lse.abs())
