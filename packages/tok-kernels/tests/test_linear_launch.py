"""Tests of launch configurations of one-token linear layers, for the shapes of real models and any other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tok_kernels.linear.triton_config import LinearLaunch, linear_launch, streams


@pytest.mark.parametrize(
    ("outputs", "inputs", "gated", "launch"),
    [
        (6144, 4096, False, LinearLaunch(4, 1024, 4)),  # Llama-3.1-8B: qkv, down, gate and up
        (4096, 14336, False, LinearLaunch(8, 2048, 8)),
        (14336, 4096, True, LinearLaunch(2, 2048, 8)),
        (2048, 8192, False, LinearLaunch(4, 2048, 8)),  # Llama-3.2-1B: down, gate and up, LM head
        (8192, 2048, True, LinearLaunch(2, 1024, 4)),
        (128256, 2048, False, LinearLaunch(4, 1024, 4)),
        (8192, 3072, True, LinearLaunch(2, 1024, 4)),  # Llama-3.2-3B
        (9728, 2560, True, LinearLaunch(2, 512, 2)),  # Qwen3-4B
        (18944, 3584, True, LinearLaunch(2, 512, 2)),  # Qwen2-7B
        (64, 80, False, LinearLaunch(4, 128, 4)),
    ],
)
def test_linear_launch_of_known_model_shapes_comes_from_the_table(
    outputs: int, inputs: int, gated: bool, launch: LinearLaunch
) -> None:
    assert linear_launch(outputs, inputs, gated=gated) == launch


@given(st.integers(1, 1 << 18), st.integers(1, 1 << 12).map(lambda eights: 8 * eights), st.booleans())
def test_linear_launch_of_any_shape_is_made_of_powers_of_two(outputs: int, inputs: int, gated: bool) -> None:
    launch = linear_launch(outputs, inputs, gated=gated)
    for number in (launch.rows, launch.block, launch.warps):
        assert number > 0
        assert number & (number - 1) == 0
    assert launch.block < 2 * max(inputs, 64)


def test_streaming_needs_one_token_and_inputs_in_multiples_of_eight() -> None:
    assert streams(1, 8)
    assert not streams(2, 8)
    assert not streams(0, 8)
    assert not streams(1, 12)
    assert not streams(1, 0)
