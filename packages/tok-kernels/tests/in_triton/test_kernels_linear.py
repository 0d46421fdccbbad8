"""Tests of linear layers for few tokens, with fused norm, activation and residual, against float64 matmuls."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from support.interpreted import INTERPRETING, outside, rerun
from support.noise import noise
from tok_kernels.backends.reference import ReferenceBackend
from tok_kernels.linear.reference import gated_linear as plain_gated_linear
from tok_kernels.linear.reference import linear as plain_linear
from tok_kernels.linear.triton import gated_linear, launch_gemv, linear
from tok_kernels.linear.triton_config import MAX_FEW_ROWS, MAX_GEMV_TOKENS, FewRowsLaunch, GemvLaunch
from tok_kernels.linear.triton_few_rows import launch_few_rows

reference = ReferenceBackend()

# The interpreter truncates float32 to bfloat16 instead of rounding it.
DTYPES = [torch.float16] + [torch.bfloat16] * (not INTERPRETING)
TOKENS = (1, MAX_GEMV_TOKENS, MAX_GEMV_TOKENS + 1, MAX_FEW_ROWS + 1)  # a kernel for two, one of few, and torch
FEW_ROWS = [
    FewRowsLaunch(64, 64, 4, 3),
    FewRowsLaunch(16, 128, 1, 2, block_m=32),
    FewRowsLaunch(32, 64, 2, 3, splits=3, prefetch=128),
    FewRowsLaunch(64, 64, 4, 2, block_m=32, splits=7, prefetch=64),  # more splits than blocks of inputs
]


@outside
def test_the_tests_of_this_file_pass_under_the_interpreter() -> None:
    rerun(__file__)


def matrix(outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    made = noise(outputs, inputs, dtype=dtype, device=device).div_(math.sqrt(inputs))
    if device.type == "cuda":
        torch.cuda.synchronize()  # with PDL a GEMM may read its weights before earlier kernels have ended
    return made


def assert_near(result: Tensor, expected: Tensor, x: Tensor) -> None:
    """Check a difference of at most one rounding to the dtype of x, or of a few if torch runs separate operations."""
    assert result.dtype == x.dtype
    assert result.shape == expected.shape
    step = torch.finfo(x.dtype).eps
    spread = step if x.shape[0] <= MAX_GEMV_TOKENS else 8 * step
    torch.testing.assert_close(result.double(), expected, rtol=spread, atol=spread * 0.5)


def exact(x: Tensor, weight: Tensor, bias: Tensor | None, norm: tuple[Tensor, float] | None) -> Tensor:
    x = x.double()
    if norm is not None:
        x = x / (x.square().mean(-1, keepdim=True) + norm[1]).sqrt() * norm[0].double()
    return functional.linear(x, weight.double(), None if bias is None else bias.double())


def exact_gated(x: Tensor, weight: Tensor, bias: Tensor | None, norm: tuple[Tensor, float] | None) -> Tensor:
    gate, up = exact(x, weight, bias, norm).chunk(2, dim=-1)
    return functional.silu(gate) * up


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("outputs", "inputs"), [(24, 64), (5, 264), (1, 8)])
def test_linear_equals_a_float64_matmul(
    outputs: int, inputs: int, tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight = noise(tokens, inputs, dtype=dtype, device=device), matrix(outputs, inputs, dtype, device)
    assert_near(linear(x, weight), exact(x, weight, None, None), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("parts", ["bias", "norm", "residual", "bias norm residual"])
def test_fused_bias_norm_and_residual_equal_separate_operations(
    parts: str, tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight = noise(tokens, 96, dtype=dtype, device=device) * 3, matrix(18, 96, dtype, device)
    bias = noise(18, dtype=dtype, device=device) if "bias" in parts else None
    norm = (noise(96, dtype=dtype, device=device), 1e-5) if "norm" in parts else None
    residual = noise(tokens, 18, dtype=dtype, device=device) if "residual" in parts else None
    expected, kept = exact(x, weight, bias, norm), x.clone()
    plain = plain_linear(x, weight, bias, norm=norm, residual_TN=None if residual is None else residual.clone())
    if residual is not None:
        expected += residual.double()
    result = linear(x, weight, bias, norm=norm, residual_TN=residual)
    assert_near(result, expected, x)
    torch.testing.assert_close(result, plain, rtol=0.02, atol=0.02)
    assert torch.equal(x, kept)
    assert residual is None or result is residual


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("parts", ["", "bias norm"])
def test_gated_linear_equals_a_matmul_and_its_activation(
    parts: str, tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight = noise(tokens, 80, dtype=dtype, device=device) * 3, matrix(22, 80, dtype, device)
    bias = noise(22, dtype=dtype, device=device) if "bias" in parts else None
    norm = (noise(80, dtype=dtype, device=device), 1e-5) if "norm" in parts else None
    result = gated_linear(x, weight, bias, norm=norm)
    assert_near(result, exact_gated(x, weight, bias, norm), x)
    plain = plain_gated_linear(x, weight, bias, norm=norm)
    torch.testing.assert_close(result, plain, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("launch", [GemvLaunch(1, 64, 1), GemvLaunch(2, 128, 2), GemvLaunch(8, 256, 4)])
def test_every_launch_config_equals_a_float64_matmul(launch: GemvLaunch, device: torch.device) -> None:
    x, weight = noise(3, 328, dtype=torch.float16, device=device), matrix(22, 328, torch.float16, device)
    norm = (noise(328, dtype=torch.float16, device=device), 1e-6)
    plain = launch_gemv(launch, x, weight, None, norm, None, gated=False)
    assert_near(plain, exact(x, weight, None, norm), x)
    gated = launch_gemv(launch, x, weight, None, norm, None, gated=True)
    assert_near(gated, exact_gated(x, weight, None, norm), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [2, 16, 39])
@pytest.mark.parametrize("launch", FEW_ROWS)
def test_every_launch_of_few_rows_equals_a_float64_matmul(
    launch: FewRowsLaunch, tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight = noise(tokens, 328, dtype=dtype, device=device), matrix(142, 328, dtype, device)
    bias, residual = (noise(size, 142, dtype=dtype, device=device) for size in (1, tokens))
    for one in (None, bias[0]):
        gated = launch_few_rows(launch, x, weight, one, None, gated=True)
        assert_near(gated, exact_gated(x, weight, one, None), x)
    expected = exact(x, weight, bias[0], None) + residual.double()
    assert_near(launch_few_rows(launch, x, weight, bias[0], residual, gated=False), expected, x)


@pytest.mark.parametrize("launch", FEW_ROWS)
def test_few_rows_have_equal_bits_in_every_launch(launch: FewRowsLaunch, device: torch.device) -> None:
    x, weight = noise(20, 328, dtype=torch.float16, device=device), matrix(142, 328, torch.float16, device)
    once, *others = (launch_few_rows(launch, x, weight, None, None, gated=False) for _ in range(4))
    assert all(torch.equal(once, other) for other in others)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("parts", ["norm", "bias norm"])
def test_linear_with_a_norm_computes_in_the_dtype_of_the_weight(parts: str, tokens: int, device: torch.device) -> None:
    x, weight = noise(tokens, 96, dtype=torch.bfloat16, device=device), matrix(18, 96, torch.float16, device)
    bias = noise(18, dtype=torch.float16, device=device) if "bias" in parts else None
    norm = (noise(96, dtype=torch.bfloat16, device=device), 1e-5)
    expected = exact(x, weight, bias, norm)
    for product in (linear, plain_linear):
        found = product(x, weight, bias, norm=norm)
        assert found.dtype == torch.float16
        torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3)  # float16's rounding, not bfloat16's
    gated = exact_gated(x, weight, bias, norm)
    for gated_product in (gated_linear, plain_gated_linear):
        torch.testing.assert_close(gated_product(x, weight, bias, norm=norm).double(), gated, rtol=0.01, atol=2e-3)


def test_linear_takes_strided_inputs_and_residuals(device: torch.device) -> None:
    wide, weight = noise(4, 200, dtype=torch.float16, device=device), matrix(12, 64, torch.float16, device)
    x, residual = wide[1:3, 8:72], wide[1:3, 100:112]
    expected, kept = exact(x, weight, None, None) + residual.double(), wide.clone()
    assert_near(linear(x, weight, residual_TN=residual), expected, x)
    kept[1:3, 100:112] = residual
    assert torch.equal(wide, kept)
    x = wide[:, :128].reshape(64, 8).T[:3]
    assert_near(linear(x, weight), exact(x, weight, None, None), x)


def test_linear_takes_float32_and_transposed_weights(device: torch.device) -> None:
    x, weight = noise(2, 64, dtype=torch.float32, device=device), matrix(64, 12, torch.float32, device).T
    torch.testing.assert_close(linear(x, weight), x @ weight.T)
    assert_near(linear(x.half(), weight.half()), exact(x.half(), weight.half(), None, None), x.half())
    norm = (weight[0], 1e-5)
    expected = reference.silu_and_mul(reference.rms_norm(x, *norm) @ weight.T)
    torch.testing.assert_close(gated_linear(x, weight, norm=norm), expected)


def test_linear_of_zero_tokens_returns_no_rows(device: torch.device) -> None:
    x, weight = torch.empty((0, 64), device=device, dtype=torch.float16), matrix(12, 64, torch.float16, device)
    assert linear(x, weight).shape == (0, 12)
    assert gated_linear(x, weight).shape == (0, 6)


def test_linear_with_zero_input_features_returns_zeros(device: torch.device) -> None:
    x, weight = torch.empty((1, 0), device=device, dtype=torch.float16), matrix(12, 0, torch.float16, device)
    assert torch.equal(linear(x, weight), x.new_zeros((1, 12)))
    assert torch.equal(gated_linear(x, weight), x.new_zeros((1, 6)))


def test_linear_refuses_mismatched_shapes_and_dtypes(device: torch.device) -> None:
    x, weight = noise(2, 64, dtype=torch.float16, device=device), matrix(11, 64, torch.float16, device)
    with pytest.raises(ValueError, match=r"weight has shape \(11, 32\); allowed for x \(2, 64\)"):
        linear(x, weight[:, :32])
    with pytest.raises(ValueError, match=r"bias has shape \(64,\); allowed: \(11,\)"):
        linear(x, weight, weight[0])
    with pytest.raises(ValueError, match=r"norm has a weight of shape \(11,\); allowed: \(64,\)"):
        linear(x, weight, norm=(weight[:, 0], 1e-5))
    with pytest.raises(ValueError, match=r"residual has shape \(2, 64\); allowed: \(2, 11\)"):
        linear(x, weight, residual_TN=x)
    with pytest.raises(ValueError, match=r"x is torch\.float16; allowed without a norm: torch\.float32, as the weight"):
        linear(x, weight.float())
    with pytest.raises(ValueError, match="gate_up has 11 rows; allowed: even numbers"):
        gated_linear(x, weight)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [*TOKENS, 17, 64])
@pytest.mark.parametrize(("hidden_size", "intermediate"), [(4096, 14336), (3072, 8192), (2560, 9728), (3584, 18944)])
def test_linear_layers_of_model_size_in_a_graph_equal_a_float64_matmul(
    hidden_size: int, intermediate: int, tokens: int
) -> None:
    device, dtype = torch.device("cuda"), torch.bfloat16
    gate_up = matrix(2 * intermediate, hidden_size, dtype, device)
    down = matrix(hidden_size, intermediate, dtype, device)
    x = noise(tokens, hidden_size, dtype=dtype, device=device)
    norm = noise(hidden_size, dtype=dtype, device=device), 1e-5

    def layer(stream_TN: Tensor) -> Tensor:
        return linear(gated_linear(stream_TN, gate_up, norm=norm), down, residual_TN=stream_TN.clone())

    layer(layer(x))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once = layer(x)
        twice = layer(once)
    for _ in range(3):
        x.normal_()
        graph.replay()
        hidden = gated_linear(x, gate_up, norm=norm)
        assert_near(hidden, exact_gated(x, gate_up, None, norm), x)
        assert_near(once, exact(hidden, down, None, None) + x.double(), x)
        hidden = gated_linear(once, gate_up, norm=norm)
        assert_near(twice, exact(hidden, down, None, None) + once.double(), x)
        results = once.clone(), twice.clone()
        graph.replay()
        assert torch.equal(once, results[0])
        assert torch.equal(twice, results[1])
