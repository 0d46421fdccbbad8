"""Tests of launch configurations of linear layers of few tokens, for the shapes of real models and any other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tok_kernels.linear.triton_config import (
    MAX_SPLIT_PROGRAMS,
    FewRowsLaunch,
    GemvLaunch,
    few_rows_launch,
    gemv_launch,
    scaled_few_rows_launch,
    scaled_gemv_launch,
    use_few_row_gemm,
    use_gemv,
)

HOPPER_SHARED_BYTES = 227 << 10


@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs", "gated", "launch"),
    [
        (1, 6144, 4096, False, GemvLaunch(4, 1024, 4)),  # Llama-3.1-8B: qkv, down, gate and up
        (1, 4096, 14336, False, GemvLaunch(8, 2048, 8)),
        (1, 14336, 4096, True, GemvLaunch(2, 2048, 8)),
        (1, 2048, 8192, False, GemvLaunch(4, 2048, 8)),  # Llama-3.2-1B: down, gate and up, LM head
        (1, 8192, 2048, True, GemvLaunch(2, 1024, 4)),
        (1, 128256, 2048, False, GemvLaunch(4, 1024, 4)),
        (1, 8192, 3072, True, GemvLaunch(2, 1024, 4)),  # Llama-3.2-3B
        (1, 9728, 2560, True, GemvLaunch(2, 512, 2)),  # Qwen3-4B
        (1, 18944, 3584, True, GemvLaunch(2, 512, 2)),  # Qwen2-7B
        (1, 64, 80, False, GemvLaunch(4, 128, 4)),
        (2, 4096, 14336, False, GemvLaunch(4, 1024, 4)),
        (2, 14336, 4096, True, GemvLaunch(2, 1024, 4)),
    ],
)
def test_gemv_launch_of_known_model_shapes_comes_from_the_table(
    tokens: int, outputs: int, inputs: int, gated: bool, launch: GemvLaunch
) -> None:
    assert gemv_launch(tokens, outputs, inputs, gated=gated) == launch


@given(st.integers(1, 2), st.integers(1, 1 << 18), st.integers(1, 1 << 12).map(lambda n: 8 * n), st.booleans())
def test_gemv_launch_of_any_shape_is_made_of_powers_of_two(tokens: int, outputs: int, inputs: int, gated: bool) -> None:
    launch = gemv_launch(tokens, outputs, inputs, gated=gated)
    for number in (launch.block_n, launch.block_k, launch.warps):
        assert number > 0
        assert number & (number - 1) == 0
    assert launch.block_k < 2 * max(inputs, 64)


def test_gemv_needs_two_tokens_at_most_and_inputs_in_multiples_of_8() -> None:
    assert use_gemv(1, 8)
    assert use_gemv(2, 8)
    assert not use_gemv(2, 8, bits=8)
    assert not use_gemv(3, 8)
    assert not use_gemv(0, 8)
    assert not use_gemv(1, 12)
    assert not use_gemv(1, 0)


@pytest.mark.parametrize(
    ("tokens", "weight_rows", "inputs", "launch"),
    [
        (2, 3072, 2048, FewRowsLaunch(64, 128, 4, 6, 16, splits=2, prefetch=256)),  # Llama-3.2-1B: qkv, o, down
        (16, 2048, 2048, FewRowsLaunch(64, 128, 4, 6, 16, splits=4, prefetch=256)),
        (17, 2048, 8192, FewRowsLaunch(64, 128, 4, 5, 32, splits=4, prefetch=256)),
        (4, 28672, 4096, FewRowsLaunch(128, 128, 8, 5, 16, prefetch=256)),  # Llama-3.1-8B: gate and up, LM head
        (64, 128256, 4096, FewRowsLaunch(128, 128, 8, 3, 64, prefetch=256)),
        (8, 64, 80, FewRowsLaunch(64, 128, 4, 6, 16, prefetch=256)),
    ],
)
def test_few_rows_launch_of_known_shapes_comes_from_the_table(
    tokens: int, weight_rows: int, inputs: int, launch: FewRowsLaunch
) -> None:
    assert few_rows_launch(tokens, weight_rows, inputs) == launch


@pytest.mark.parametrize(
    ("tokens", "weight_rows", "inputs", "launch"),
    [
        (8, 28672, 4096, FewRowsLaunch(64, 128, 4, 8, 16, prefetch=512)),  # Llama-3.1-8B: gate and up, down, qkv
        (32, 28672, 4096, FewRowsLaunch(128, 256, 4, 4, 32)),
        (8, 4096, 14336, FewRowsLaunch(64, 256, 4, 8, 16, splits=2, prefetch=512)),
        (8, 6144, 4096, FewRowsLaunch(64, 256, 4, 6, 16)),
        (32, 2048, 8192, FewRowsLaunch(64, 256, 4, 8, 32, splits=4, prefetch=512)),  # Llama-3.2-1B: down
        (33, 2048, 8192, FewRowsLaunch(64, 256, 4, 6, 64)),
        (8, 64, 80, FewRowsLaunch(64, 128, 4, 6, 16)),
    ],
)
def test_8_bit_few_rows_launch_of_known_shapes_comes_from_the_table(
    tokens: int, weight_rows: int, inputs: int, launch: FewRowsLaunch
) -> None:
    assert scaled_few_rows_launch(tokens, weight_rows, inputs, HOPPER_SHARED_BYTES) == launch


@pytest.mark.parametrize(
    ("inputs", "gated", "launch"),
    [
        (2048, True, GemvLaunch(16, 512, 4, 16)),
        (4096, True, GemvLaunch(8, 512, 4, 16)),
        (80, True, GemvLaunch(4, 128, 4, 16)),
        (4096, False, GemvLaunch(4, 4096, 4, 16)),
        (14336, False, GemvLaunch(4, 2048, 4, 16)),
        (9728, False, GemvLaunch(8, 1024, 4)),
    ],
)
def test_8_bit_gemv_launch_of_known_inputs_comes_from_the_table(inputs: int, gated: bool, launch: GemvLaunch) -> None:
    assert scaled_gemv_launch(inputs, gated=gated) == launch


@pytest.mark.parametrize("shared_kib", [99, 163, 227], ids=["Ada", "A100", "Hopper"])
@given(st.integers(1, 64), st.integers(1, 1 << 18), st.integers(1, 1 << 15))
def test_stages_of_8_bit_few_rows_fit_in_shared_memory(
    shared_kib: int, tokens: int, weight_rows: int, inputs: int
) -> None:
    launch = scaled_few_rows_launch(tokens, weight_rows, inputs, shared_kib << 10)
    assert 2 <= launch.stages <= 8
    assert launch.stages * (launch.block_n + launch.block_m) * launch.block_k < shared_kib << 10


@given(st.integers(1, 64), st.integers(1, 1 << 18), st.integers(1, 1 << 15), st.booleans())
def test_few_rows_launch_of_any_shape_covers_its_tokens(
    tokens: int, weight_rows: int, inputs: int, scaled: bool
) -> None:
    if scaled:
        launch = scaled_few_rows_launch(tokens, weight_rows, inputs, HOPPER_SHARED_BYTES)
    else:
        launch = few_rows_launch(tokens, weight_rows, inputs)
    assert tokens <= launch.block_m
    assert launch.splits == 1 or launch.splits * -(-weight_rows // launch.block_n) <= MAX_SPLIT_PROGRAMS
    assert launch.splits <= -(-inputs // launch.block_k)


def test_few_rows_need_up_to_64_tokens_or_32_of_narrow_weights() -> None:
    assert use_few_row_gemm(2, 2048, 2048)
    assert use_few_row_gemm(32, 2048, 2048)
    assert not use_few_row_gemm(33, 2048, 2048)
    assert use_few_row_gemm(64, 16384, 2048)
    assert not use_few_row_gemm(65, 16384, 2048)
    assert not use_few_row_gemm(0, 2048, 2048)
    assert not use_few_row_gemm(2, 2048, 2044)
    assert not use_few_row_gemm(2, 2048, 0)
