"""The table of rotary angles against transformers' own, and its refusals."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tok_kernels import Llama3Scaling, RopeScaling, rope_table


def theirs(head_dim: int, positions: int, base: float, scaling: RopeScaling) -> torch.Tensor:
    parameters: dict[str, object] = {"rope_type": "default", "rope_theta": base}
    if scaling is not None:
        parameters |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        }
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters=parameters,
    )
    position = torch.arange(positions)[None]
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), position)
    half = head_dim // 2
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)


@pytest.mark.parametrize("scaling", [None, Llama3Scaling(8.0, 1.0, 4.0, 8192), Llama3Scaling(32.0, 1.0, 4.0, 64)])
@pytest.mark.parametrize(("head_dim", "base"), [(16, 10000.0), (64, 500000.0), (128, 1e6)])
def test_the_table_equals_that_of_transformers(head_dim: int, base: float, scaling: RopeScaling) -> None:
    table = rope_table(head_dim, 5000, base, scaling)
    assert table.shape == (5000, head_dim)
    assert table.dtype == torch.float32
    # A float32 angle near 5000 is off by up to 2.4e-4: agreement below that shows the same roundings.
    torch.testing.assert_close(table, theirs(head_dim, 5000, base, scaling), rtol=0, atol=1e-6)


def test_position_zero_does_not_turn() -> None:
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
def test_a_bad_argument_is_refused_by_name(arguments: tuple[int, int, float], message: str) -> None:
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
def test_bad_scaling_is_refused_by_name(values: tuple[float, float, float, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Llama3Scaling(*values)
