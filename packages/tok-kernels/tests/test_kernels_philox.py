"""Tests of the Philox generator against published vectors, and of the uniform numbers made from it."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from tok_kernels.sampling.reference.philox import philox4x32, uniform, uniforms

# Random123's known-answer vectors for philox4x32-10: counter, key, result.
VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(column: int, device: torch.device) -> list[torch.Tensor]:
    rows = [[int(word, 16) for word in vector[column].split()] for vector in VECTORS]
    return list(torch.tensor(rows, device=device).unbind(-1))


def test_philox4x32_equals_the_random123_known_answer_vectors(device: torch.device) -> None:
    c0, c1, c2, c3 = words(0, device)
    k0, k1 = words(1, device)
    result = philox4x32((c0, c1, c2, c3), (k0, k1))
    assert [word.tolist() for word in result] == [word.tolist() for word in words(2, device)]


def test_uniforms_are_made_of_53_bits_of_two_philox_words_each(device: torch.device) -> None:
    # Seed -1 has all 64 bits set; sample and position fit in 32 bits.
    seed, sample, position = (torch.tensor([x], device=device) for x in (-1, 5, 9))
    zero, ones = torch.zeros_like(seed), torch.full_like(seed, 0xFFFFFFFF)
    first, second, third, fourth = philox4x32((sample, position, zero, zero), (ones, ones))
    exact = ((int(first) >> 5) * 2**26 + (int(second) >> 6)) / 2**53
    assert uniform(seed, sample, position).tolist() == [exact]
    other = ((int(third) >> 5) * 2**26 + (int(fourth) >> 6)) / 2**53
    assert [x.tolist() for x in uniforms(seed, sample, position)] == [[exact], [other]]


@pytest.mark.parametrize("varied", ["seed", "high seed", "sample", "position"])
def test_philox_numbers_are_uniform_and_uncorrelated_per_key_part(varied: str, device: torch.device) -> None:
    count = torch.arange(20_000, device=device)
    fixed = torch.full_like(count, 42)
    seed, sample, position = fixed, fixed, fixed
    match varied:
        case "seed":
            seed = count
        case "high seed":
            seed = count << 32
        case "sample":
            sample = count
        case _:
            position = count
    u = uniform(seed, sample, position).cpu().numpy()
    assert 0.0 <= u.min() <= u.max() < 1.0
    assert len(set(u.tolist())) == len(u)
    assert stats.kstest(u, "uniform").pvalue > 1e-4
    assert stats.pearsonr(u[:-1], u[1:]).pvalue > 1e-4


def test_the_two_uniforms_of_a_row_are_uncorrelated(device: torch.device) -> None:
    count = torch.arange(20_000, device=device)
    first, second = (x.cpu().numpy() for x in uniforms(count * 0 + 42, count * 0, count))
    assert stats.kstest(second, "uniform").pvalue > 1e-4
    assert stats.pearsonr(first, second).pvalue > 1e-4


def test_philox_streams_of_different_key_parts_are_uncorrelated(device: torch.device) -> None:
    count = torch.arange(1, 20_001, device=device)
    fixed = torch.zeros_like(count)
    streams = [
        uniform(count, fixed, fixed),
        uniform(fixed, count, fixed),
        uniform(fixed, fixed, count),
        uniform(count << 32, fixed, fixed),
    ]
    table = torch.stack(streams).cpu().numpy()
    for i in range(len(table)):
        for j in range(i):
            assert stats.pearsonr(table[i], table[j]).pvalue > 1e-4
