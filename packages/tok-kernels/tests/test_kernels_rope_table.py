"""Tests of RoPE tables and rows against transformers, and of refused arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tok_kernels import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    YarnScaling,
    rope_rows,
    rope_table,
)

LONG = LongRopeScaling(
    short_factors=tuple(1.0 + column / 8 for column in range(8)),
    long_factors=tuple(2.0 + column for column in range(8)),
    original_max_positions=64,
    attention_factor=1.25,
)


def theirs(head_dim: int, base: float, scaling: RopeScaling, max_positions: int) -> LlamaRotaryEmbedding:
    """Return a new transformers module with the same settings."""
    parameters: dict[str, object] = {"rope_type": "default", "rope_theta": base}
    match scaling:
        case Llama3Scaling(factor, low, high, original):
            own: dict[str, object] = {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
        case LinearScaling(factor):
            own = {"rope_type": "linear", "factor": factor}
        case DynamicScaling(factor, max_positions):
            own = {"rope_type": "dynamic", "factor": factor}
        case YarnScaling(factor, original, attention_factor, fast, slow, truncate):
            own = {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original,
                "attention_factor": attention_factor,
                "beta_fast": fast,
                "beta_slow": slow,
                "truncate": truncate,
            }
        case LongRopeScaling(short, long, original, attention_factor):
            own = {
                "rope_type": "longrope",
                "short_factor": list(short),
                "long_factor": list(long),
                "original_max_position_embeddings": original,
                "attention_factor": attention_factor,
            }
        case None:
            own = {}
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rope_parameters=parameters | own,
    )
    return LlamaRotaryEmbedding(config)


def angles(module: LlamaRotaryEmbedding, position: torch.Tensor) -> torch.Tensor:
    """Return the rows that transformers computes for these positions in one forward pass."""
    cos, sin = module(torch.zeros(1), position[None])
    half = cos.shape[-1] // 2
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        Llama3Scaling(8.0, 1.0, 4.0, 8192),
        Llama3Scaling(32.0, 1.0, 4.0, 64),
        LinearScaling(4.0),
        LinearScaling(1.0),
        YarnScaling(4.0, 1024, 1.1386294361119891),
        YarnScaling(40.0, 64, 1.0, 16.0, 2.0),
        YarnScaling(8.0, 4096, 0.5, 32.0, 1.0, truncate=False),
        YarnScaling(2.0, 4, 1.0),  # no column rotates often enough: all are stretched
    ],
)
@pytest.mark.parametrize(("head_dim", "base"), [(16, 10000.0), (64, 500000.0), (128, 1e6)])
def test_rope_table_equals_that_of_transformers(head_dim: int, base: float, scaling: RopeScaling) -> None:
    table = rope_table(head_dim, 5000, base, scaling)
    assert table.shape == (5000, head_dim)
    assert table.dtype == torch.float32
    expected = angles(theirs(head_dim, base, scaling, 131072), torch.arange(5000))
    # A float32 angle near 5000 is off by up to 2.4e-4: agreement below that shows the same roundings.
    torch.testing.assert_close(table, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("scaling", [DynamicScaling(4.0, 64), DynamicScaling(1.0, 64), LONG])
def test_dynamic_rope_table_equals_transformers_at_growing_lengths(scaling: RopeScaling) -> None:
    table, module = rope_table(16, 300, 10000.0, scaling), theirs(16, 10000.0, scaling, 256)
    grown = torch.cat([angles(module, torch.tensor([position])) for position in range(300)])
    torch.testing.assert_close(table, grown, rtol=0, atol=2e-5)  # the base is a power in float32, off by an ulp
    assert not torch.equal(table[64:], rope_table(16, 300, 10000.0)[64:]) or scaling == DynamicScaling(1.0, 64)


@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_rope_rows_have_the_same_bits_among_any_number_of_rows(head_dim: int) -> None:
    scaling, position = (
        DynamicScaling(4.0, 64),
        torch.randint(0, 255, (40,), generator=torch.Generator().manual_seed(0)),
    )
    length = torch.maximum(position + 1, torch.tensor(150))
    all_rows = rope_rows(head_dim, 10000.0, scaling, position, length)
    for rows in range(1, 40):
        some = slice(rows), slice(-rows, None)
        for part in some:
            found = rope_rows(head_dim, 10000.0, scaling, position[part], length[part])
            assert torch.equal(found, all_rows[part]), rows


@pytest.mark.parametrize("scaling", [DynamicScaling(4.0, 64), LONG])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_rope_rows_of_one_forward_pass_equal_those_of_transformers(length: int, scaling: RopeScaling) -> None:
    position = torch.arange(length)
    rows = rope_rows(16, 10000.0, scaling, position, torch.full((length,), length))
    expected = angles(theirs(16, 10000.0, scaling, 256), position)
    torch.testing.assert_close(rows, expected, rtol=0, atol=2e-5)


def test_rope_at_position_zero_is_the_identity() -> None:
    assert rope_table(8, 1, 10000.0).tolist() == [[1.0] * 4 + [0.0] * 4]


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones() -> None:
    scaling = Llama3Scaling(8.0, 1.0, 4.0, 8192)
    plain, scaled = rope_table(128, 2, 500000.0), rope_table(128, 2, 500000.0, scaling)
    angle, stretched = plain[1, 64:].asin(), scaled[1, 64:].asin()
    torch.testing.assert_close(stretched[1:20], angle[1:20])
    torch.testing.assert_close(stretched[-20:], angle[-20:] / 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((7, 10, 1e4), "head_dim is 7; it must be positive and even"),
        ((0, 10, 1e4), "head_dim is 0"),
        ((8, 0, 1e4), "max_positions is 0; it must be at least 1"),
        ((8, 10, 0.0), "base is 0.0; it must be a positive number"),
        ((8, 10, float("nan")), "base is nan"),
    ],
)
def test_rope_table_refuses_bad_arguments_by_name(arguments: tuple[int, int, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rope_table(*arguments)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0.0, 1.0, 4.0, 8192), "factor is 0.0; it must be a positive number"),
        ((8.0, -1.0, 4.0, 8192), "low_freq_factor is -1.0"),
        ((8.0, 1.0, float("inf"), 8192), "high_freq_factor is inf"),
        ((8.0, 1.0, 4.0, 0), "original_max_positions is 0"),
        ((8.0, 4.0, 4.0, 8192), r"high_freq_factor is 4.0; it must be above low_freq_factor \(4.0\)"),
    ],
)
def test_bad_llama3_scaling_is_refused_by_name(values: tuple[float, float, float, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Llama3Scaling(*values)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LinearScaling(0.0), "factor is 0.0; it must be a positive number"),
        (lambda: DynamicScaling(2.0, 0), "max_positions is 0"),
        (lambda: YarnScaling(4.0, 64, -1.0), "attention_factor is -1.0"),
        (lambda: replace(LONG, long_factors=(1.0, 0.0)), r"long_factors is \(1.0, 0.0\); all must be positive"),
        (lambda: rope_table(8, 10, 1e4, LONG), "short_factors has 8 entries; it must have 4"),
        (lambda: rope_table(2, 10, 1e4, DynamicScaling(2.0, 8)), "head_dim is 2; dynamic scaling needs at least 4"),
    ],
)
def test_bad_rope_scaling_is_refused_by_name(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
