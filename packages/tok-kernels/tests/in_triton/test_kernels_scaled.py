"""Tests of linear layers with weights of 8 bits against float64 matmuls of the same rounded activations."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from support.interpreted import INTERPRETING, outside, rerun
from support.noise import noise
from tok_kernels import MAX_VALUES, QuantizedRows, ScaledWeight
from tok_kernels.backends.reference import ReferenceBackend
from tok_kernels.linear.triton import launch_gemv
from tok_kernels.linear.triton_config import FewRowsLaunch, GemvLaunch
from tok_kernels.linear.triton_few_rows import launch_few_rows
from tok_kernels.linear.triton_quantize import apply_scales, gate_and_quantize, quantize_rows
from tok_kernels.linear.triton_scaled import scaled_gated_linear, scaled_linear

reference = ReferenceBackend()
FP8, INT8 = torch.float8_e4m3fn, torch.int8
# The interpreter truncates float32 to bfloat16 and to float8 instead of rounding it.
SHORT = torch.float16 if INTERPRETING else torch.bfloat16
DTYPES = [INT8] if INTERPRETING else [INT8, FP8]


@outside
def test_the_tests_of_this_file_pass_under_the_interpreter() -> None:
    rerun(__file__)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    made: torch.dtype = request.param
    return made


def scaled_weight(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> ScaledWeight:
    dense = noise(rows, columns, device=device) / math.sqrt(columns)
    scale = dense.abs().amax(1, keepdim=True) / MAX_VALUES[dtype]
    values = dense / scale
    return finished(ScaledWeight((values if dtype == FP8 else values.round()).to(dtype), scale))


def weight_in_blocks(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> ScaledWeight:
    block = 128
    values = noise(rows, columns, device=device).mul_(30).to(dtype)
    scale = noise(rows // block, columns // block, device=device).abs().div_(30 * math.sqrt(columns))
    return finished(ScaledWeight(values, scale.repeat_interleave(block, 0), block, block))


def finished(weight: ScaledWeight) -> ScaledWeight:
    """Return the weight when it is written: with PDL a GEMM may read its weights before earlier kernels have ended."""
    if weight.values_NK.is_cuda:
        torch.cuda.synchronize()
    return weight


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x as it is after rounding each row to the dtype, in float64."""
    scale = x.float().abs().amax(1, keepdim=True) / MAX_VALUES[dtype]
    scale = torch.where(scale == 0, 1, scale)
    values = x.float() * (1 / scale)
    return (values if dtype == FP8 else values.round()).to(dtype).double() * scale.double()


def normed(x: Tensor, norm: tuple[Tensor, float] | None) -> Tensor:
    x = x.float()
    return x if norm is None else functional.rms_norm(x, x.shape[1:], norm[0].float(), norm[1])


def dequantised(rows: QuantizedRows) -> Tensor:
    return (rows.values_TK.double() * rows.scale_TG.double())[: rows.tokens]


def assert_near(found: Tensor, expected: Tensor, spread: float = 0.01) -> None:
    difference = torch.linalg.vector_norm(found.double() - expected) / torch.linalg.vector_norm(expected)
    assert difference < spread


@pytest.mark.parametrize("columns", [16, 80, 4112])
def test_each_row_is_rounded_to_nearest_by_its_largest_value(
    columns: int, dtype: torch.dtype, device: torch.device
) -> None:
    x = noise(5, columns, dtype=SHORT, device=device) * 3
    x[2] = 0
    weight = scaled_weight(16, columns, dtype, device)
    rows = quantize_rows(x, weight)
    limit = MAX_VALUES[dtype]
    assert rows.values_TK.dtype == dtype
    assert rows.values_TK[0].float().abs().max() == limit
    assert not rows.values_TK[2].float().any()
    torch.testing.assert_close(rows.scale_TG[:, 0][[0, 1, 3, 4]], x.float().abs().amax(1)[[0, 1, 3, 4]] / limit)
    step = 2**-4 if dtype == FP8 else 0.501 / limit  # relative to the number itself, or to the largest one
    of = x.double().abs() if dtype == FP8 else x.double().abs().amax(1, keepdim=True)
    assert ((dequantised(rows) - x.double()).abs() <= of * step + 2e-5 * x.abs().max().item()).all()


def test_norm_and_rounding_in_one_kernel_equal_both_one_after_the_other(
    dtype: torch.dtype, device: torch.device
) -> None:
    x, gain = noise(4, 4128, dtype=SHORT, device=device) * 5, noise(4128, dtype=SHORT, device=device)
    rows = quantize_rows(x, scaled_weight(16, 4128, dtype, device), (gain, 1e-5))
    assert_near(dequantised(rows), rounded(normed(x, (gain, 1e-5)), dtype), spread=0.005)


@pytest.mark.parametrize("scaled", [True, False])
def test_gate_and_rounding_in_one_kernel_equal_both_one_after_the_other(
    scaled: bool, dtype: torch.dtype, device: torch.device
) -> None:
    sums, bias = noise(3, 160, dtype=SHORT, device=device), noise(160, dtype=SHORT, device=device)
    x_scale, weight = noise(3, 1, device=device).abs() + 0.5, scaled_weight(160, 16, dtype, device)
    weight = ScaledWeight(weight.values_NK, noise(160, 1, device=device).abs() + 0.5)
    down = scaled_weight(16, 80, dtype, device)
    rows = gate_and_quantize(sums, x_scale if scaled else None, weight, bias, down)
    exact = sums.float() * x_scale * weight.scale_NG.t() if scaled else sums.float()
    gate, up = (exact + bias.float()).chunk(2, 1)
    assert_near(dequantised(rows), rounded(functional.silu(gate) * up, dtype), spread=0.005)


@pytest.mark.parametrize("add", [False, True])
def test_finish_rows_applies_scales_bias_and_the_values_before(add: bool, device: torch.device) -> None:
    sums = noise(3, 48, dtype=SHORT, device=device)
    x_scale, weight = noise(3, 1, device=device), ScaledWeight(sums, noise(48, 1, device=device))
    bias, out = noise(48, dtype=SHORT, device=device), noise(3, 100, dtype=SHORT, device=device)[:, 10:58]
    expected = sums.double() * x_scale.double() * weight.scale_NG.double().t() + bias.double()
    expected = expected + out.double() if add else expected
    assert apply_scales(sums, x_scale, weight, bias, out, add=add) is out
    assert_near(out, expected)


@pytest.mark.parametrize("tokens", [1, 2, 17])
@pytest.mark.parametrize("parts", ["", "bias", "norm", "residual", "bias norm residual"])
def test_scaled_linear_equals_a_float64_matmul_of_rounded_rows(
    parts: str, tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight = noise(tokens, 320, dtype=SHORT, device=device) * 3, scaled_weight(80, 320, dtype, device)
    bias = noise(80, dtype=SHORT, device=device) if "bias" in parts else None
    norm = (noise(320, dtype=SHORT, device=device), 1e-5) if "norm" in parts else None
    residual = noise(tokens, 80, dtype=SHORT, device=device) if "residual" in parts else None
    input_ = normed(x, norm).double() if tokens == 1 else rounded(normed(x, norm), dtype)
    expected = functional.linear(input_, weight.dense(torch.float64), None if bias is None else bias.double())
    expected = expected if residual is None else expected + residual.double()
    result = scaled_linear(x, weight, bias, norm=norm, residual_TN=residual)
    assert result.dtype == x.dtype
    assert residual is None or result is residual
    assert_near(result, expected)


@pytest.mark.parametrize("tokens", [1, 5])
def test_gate_of_few_rows_equals_a_float64_matmul_and_its_activation(
    tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight = noise(tokens, 272, dtype=SHORT, device=device), scaled_weight(160, 272, dtype, device)
    norm, bias = (noise(272, dtype=SHORT, device=device), 1e-5), noise(160, dtype=SHORT, device=device)
    down = scaled_weight(16, 80, dtype, device)
    input_ = normed(x, norm).double() if tokens == 1 else rounded(normed(x, norm), dtype)
    gate, up = functional.linear(input_, weight.dense(torch.float64), bias.double()).chunk(2, 1)
    result = scaled_gated_linear(x, weight, bias, norm=norm, down=down)
    assert isinstance(result, Tensor)
    assert_near(result, functional.silu(gate) * up)


@pytest.mark.parametrize("splits", [2, 3])
def test_split_k_of_few_rows_equals_a_float64_matmul(splits: int, dtype: torch.dtype, device: torch.device) -> None:
    x, weight = noise(5, 320, dtype=SHORT, device=device), scaled_weight(80, 320, dtype, device)
    residual = noise(5, 80, dtype=SHORT, device=device)
    expected = rounded(x, dtype) @ weight.dense(torch.float64).t() + residual.double()
    launch = FewRowsLaunch(64, 64, 4, 2, splits=splits, prefetch=128)
    launch_few_rows(launch, quantize_rows(x, weight), weight, None, residual, gated=False)
    assert_near(residual, expected)


@pytest.mark.parametrize("parts", ["", "bias norm residual"])
def test_one_token_takes_scales_of_blocks(parts: str, device: torch.device) -> None:
    rows, columns = 128, 384
    weight = weight_in_blocks(rows, columns, INT8 if INTERPRETING else FP8, device)
    x = noise(1, columns, dtype=SHORT, device=device)
    bias = noise(rows, dtype=SHORT, device=device) if "bias" in parts else None
    norm = (noise(columns, dtype=SHORT, device=device), 1e-5) if "norm" in parts else None
    residual = noise(1, rows, dtype=SHORT, device=device) if "residual" in parts else None
    launch = GemvLaunch(4, 256, 4, vector=16)
    expected = functional.linear(
        normed(x, norm).double(), weight.dense(torch.float64), None if bias is None else bias.double()
    )
    expected = expected if residual is None else expected + residual.double()
    found = launch_gemv(launch, x, weight, bias, norm, residual, gated=False)
    assert_near(found, expected)
    gate, up = functional.linear(normed(x, norm).double(), weight.dense(torch.float64)).chunk(2, 1)
    assert_near(launch_gemv(launch, x, weight, None, norm, None, gated=True), functional.silu(gate) * up)


def test_shapes_that_no_kernel_multiplies_are_dequantised(dtype: torch.dtype, device: torch.device) -> None:
    x, weight = noise(3, 24, device=device).to(SHORT), scaled_weight(7, 24, dtype, device)
    assert torch.equal(scaled_linear(x, weight), reference.scaled_linear(x, weight))


def test_bias_of_another_dtype_is_added(dtype: torch.dtype, device: torch.device) -> None:
    """QKV projections of bfloat16 models have a float16 bias."""
    x, weight = noise(100, 24, device=device).to(SHORT), scaled_weight(7, 24, dtype, device)
    bias = noise(7, device=device).to(torch.bfloat16 if INTERPRETING else torch.float16)
    expected = functional.linear(x.double(), weight.dense(SHORT).double(), bias.double())
    for multiply in (reference.scaled_linear, scaled_linear):
        assert_near(multiply(x, weight, bias), expected)


def test_float32_activations_are_not_rounded(dtype: torch.dtype, device: torch.device) -> None:
    x, weight = noise(3, 32, device=device), scaled_weight(16, 32, dtype, device)
    torch.testing.assert_close(scaled_linear(x, weight), reference.scaled_linear(x, weight))


@pytest.mark.skipif(not INTERPRETING and not torch.cuda.is_available(), reason="needs a CUDA device")
@settings(deadline=None, max_examples=10)
@given(tokens=st.integers(2, 16), rows=st.integers(1, 12), columns=st.integers(1, 40), seed=st.integers(0, 99))
def test_equal_rows_give_equal_results_wherever_they_are(tokens: int, rows: int, columns: int, seed: int) -> None:
    device = torch.device("cpu" if INTERPRETING else "cuda")
    x, weight = noise(1, 16 * columns, dtype=SHORT, device=device), scaled_weight(16 * rows, 16 * columns, INT8, device)
    alone = scaled_linear(x.expand(2, -1), weight)[0]
    mixed = noise(tokens, 16 * columns, dtype=SHORT, device=device)
    mixed[seed % tokens] = x[0]
    assert torch.equal(scaled_linear(mixed, weight)[seed % tokens], alone)


SHAPES = [(6144, 4096), (4096, 14336), (3072, 2048), (2048, 8192), (2560, 8192), (8192, 7168)]  # 8B, 1B, 70B by 4


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETING, reason="takes a GPU")
@pytest.mark.parametrize("tokens", [1, 2, 16, 33, 64, 65, 100, 256, 1000, 8192])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_every_size_of_real_models_equals_a_float32_matmul(rows: int, columns: int, tokens: int) -> None:
    device = torch.device("cuda")
    for dtype in (FP8, INT8):
        # No row of the weight: the tensor cores sum float8 products with 14 bits, and sums of squares come out small.
        x = noise(tokens, columns, dtype=SHORT, device=device).flip(1)
        weight = scaled_weight(rows, columns, dtype, device)
        residual = noise(tokens, rows, dtype=SHORT, device=device)
        before = residual.clone()
        input_ = (x.double() if tokens == 1 else rounded(x, dtype)).float()
        expected = input_ @ weight.dense(torch.float32).t()
        assert_near(scaled_linear(x, weight), expected.double())
        assert_near(scaled_linear(x, weight, residual_TN=residual), (expected + before.float()).double())
        gate, up = expected.chunk(2, 1)
        found = scaled_gated_linear(x, weight, down=scaled_weight(64, rows // 2, dtype, device))
        found = dequantised(found) if isinstance(found, QuantizedRows) else found
        # Rounding to 8 bits is the largest part of the difference.
        assert_near(found, (functional.silu(gate) * up).double(), spread=0.04)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETING, reason="takes a GPU")
@pytest.mark.parametrize("tokens", [1, 3, 64, 130, 1000])
def test_blocks_of_128_equal_a_float32_matmul(tokens: int) -> None:
    device = torch.device("cuda")
    rows, columns, block = 1024, 2048, 128
    weight = weight_in_blocks(rows, columns, FP8, device)
    x = noise(tokens, columns, dtype=SHORT, device=device)
    in_blocks = torch.unflatten(x.float(), 1, (-1, block))
    x_scale = in_blocks.abs().amax(2, keepdim=True) / 448
    input_ = x.float() if tokens == 1 else ((in_blocks / x_scale).to(FP8).float() * x_scale).flatten(1)
    expected = input_ @ weight.dense(torch.float32).t()
    assert_near(scaled_linear(x, weight), expected.double())
    residual = noise(tokens, rows, dtype=SHORT, device=device)
    expected += residual.float()
    assert_near(scaled_linear(x, weight, residual_TN=residual), expected.double())


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETING, reason="takes a GPU")
@pytest.mark.parametrize("tokens", [1, 8, 200])
def test_graphs_replay_and_repeated_runs_give_equal_bits(tokens: int) -> None:
    device = torch.device("cuda")
    x, weight = noise(tokens, 2048, dtype=SHORT, device=device), scaled_weight(4096, 2048, FP8, device)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        once = scaled_linear(x, weight)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = scaled_linear(x, weight)
        for _ in range(3):
            graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, once)
    assert torch.equal(scaled_linear(x, weight), once)
