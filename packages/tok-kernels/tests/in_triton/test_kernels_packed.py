"""Tests of linear layers with packed integer weights against float64 matmuls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from support.interpreted import INTERPRETING, outside, rerun
from support.matmul_weights import packed_weight
from support.noise import noise
from tok_kernels import PackedWeight
from tok_kernels.linear import triton_packed
from tok_kernels.linear.triton_config import PackedGemmLaunch, PackedGemvLaunch
from tok_kernels.linear.triton_packed import (
    dequantize,
    launch_packed_gemm,
    launch_packed_gemv,
    packed_gated_linear,
    packed_linear,
)

# The interpreter truncates float32 to bfloat16 instead of rounding it.
DTYPES = [torch.float16] + [torch.bfloat16] * (not INTERPRETING)
# Bits, columns of a group, whether there are zero points.
FORMATS = [(4, 128, True), (4, 32, False), (4, None, True), (8, 64, True), (8, None, False)]


@outside
def test_the_tests_of_this_file_pass_under_the_interpreter() -> None:
    rerun(__file__)


def wide(weight: PackedWeight) -> Tensor:
    """Return the weight in float64, not rounded."""
    exact = PackedWeight(
        *(weight.words, weight.scale_GF, weight.zero_GF, weight.bits, weight.columns, weight.group),
        dtype=torch.float64,
        split_k_counters=weight.split_k_counters,
    )
    return exact.dense()


def expect(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    *,
    gated: bool = False,
) -> Tensor:
    x = x.double()
    if norm is not None:
        x = x / (x.square().mean(-1, keepdim=True) + norm[1]).sqrt() * norm[0].double()
    y = functional.linear(x, wide(weight), None if bias is None else bias.double())
    if gated:
        gate, up = y.chunk(2, -1)
        return functional.silu(gate) * up
    return y if residual is None else y + residual.double()


def assert_near(found: Tensor, expected: Tensor, roundings: float = 2) -> None:
    """Check a difference of at most a few roundings to the dtype of the result."""
    step = roundings * torch.finfo(found.dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=step, atol=step * 0.5)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
@pytest.mark.parametrize(("bits", "group", "zeros"), FORMATS)
def test_dequantised_weight_has_the_bits_of_the_reference(
    bits: int, group: int | None, zeros: bool, dtype: torch.dtype, device: torch.device
) -> None:
    for columns in (160, 300):
        weight = packed_weight(24, columns, device, bits, group, zeros, dtype)
        assert torch.equal(dequantize(weight), weight.dense())


def test_columns_may_name_their_groups(device: torch.device) -> None:
    plain = packed_weight(40, 96, device, group=32)
    order = torch.stack([torch.randperm(96, generator=torch.Generator().manual_seed(part)) // 32 for part in (0, 1)])
    weight = PackedWeight(
        *(plain.words, plain.scale_GF, plain.zero_GF, 4, 96, 32, torch.float16, plain.split_k_counters),
        group_of_column=order.int().to(device),
        part_rows=(16, 24),
    )
    assert torch.equal(dequantize(weight), weight.dense())
    assert not torch.equal(weight.dense(), plain.dense())
    x = noise(1, 96, dtype=torch.float16, device=device)
    assert_near(packed_linear(x, weight), functional.linear(x.double(), weight.dense().double()), 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(("bits", "group", "zeros"), FORMATS)
def test_packed_linear_equals_a_float64_matmul(
    bits: int, group: int | None, zeros: bool, tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    weight = packed_weight(72, 352, device, bits, group, zeros, dtype)
    x = noise(tokens, 352, dtype=dtype, device=device) * 3
    bias, residual = (noise(size, 72, dtype=dtype, device=device) for size in (1, tokens))
    norm = (noise(352, dtype=dtype, device=device), 1e-5)
    assert_near(packed_linear(x, weight), expect(x, weight))
    expected = expect(x, weight, bias[0], norm, residual)
    result = packed_linear(x, weight, bias[0], norm=norm, residual_TN=residual)
    assert result is residual
    assert_near(result, expected, 8)
    assert not weight.split_k_counters.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 5])
def test_packed_gated_linear_equals_a_float64_matmul_and_its_activation(
    tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    weight = packed_weight(72, 256, device, dtype=dtype)
    x, bias = noise(tokens, 256, dtype=dtype, device=device) * 3, noise(72, dtype=dtype, device=device)
    norm = (noise(256, dtype=dtype, device=device), 1e-5)
    assert_near(packed_gated_linear(x, weight), expect(x, weight, gated=True), 4)
    found = packed_gated_linear(x, weight, bias, norm=norm)
    assert_near(found, expect(x, weight, bias, norm, gated=True), 12)


@pytest.mark.parametrize("launch", [PackedGemvLaunch(1, 128, 1), PackedGemvLaunch(4, 512, 4)])
@pytest.mark.parametrize(("bits", "group", "zeros"), [one for one in FORMATS if one[0] == 4])
def test_every_launch_for_one_token_equals_a_float64_matmul(
    launch: PackedGemvLaunch, bits: int, group: int | None, zeros: bool, device: torch.device
) -> None:
    weight = packed_weight(22, 320, device, bits, group, zeros)
    x = noise(1, 320, dtype=torch.float16, device=device)
    for gated in (False, True):
        found = launch_packed_gemv(launch, x, weight, None, None, None, gated=gated)
        assert_near(found, expect(x, weight, gated=gated), 4)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("bits", "group", "zeros"), FORMATS)
def test_every_launch_with_tensor_cores_equals_a_float64_matmul(
    splits: int, bits: int, group: int | None, zeros: bool, device: torch.device
) -> None:
    weight = packed_weight(56, 416, device, bits, group, zeros)
    x = noise(18, 416, dtype=torch.float16, device=device)
    launch = PackedGemmLaunch(32, 16, group or 64, splits, 4, 2)
    for gated in (False, True):
        found = launch_packed_gemm(launch, x, weight, None, None, gated=gated)
        assert_near(found, expect(x, weight, gated=gated), 4)
        assert not weight.split_k_counters.any()


def test_norm_may_have_another_dtype_than_the_weight(device: torch.device) -> None:
    if INTERPRETING:
        pytest.skip("the interpreter truncates float32 to bfloat16")
    weight, norm = packed_weight(48, 256, device), (noise(256, dtype=torch.bfloat16, device=device), 1e-5)
    for tokens in (1, 3):
        x = noise(tokens, 256, dtype=torch.bfloat16, device=device)
        found = packed_linear(x, weight, norm=norm)
        assert found.dtype == torch.float16
        assert_near(found, expect(x, weight, None, norm), 8)


def test_strided_and_unaligned_operands_are_taken(device: torch.device) -> None:
    weight = packed_weight(24, 128, device)
    broad = noise(4, 333, dtype=torch.float16, device=device)
    for rows in (1, 3):
        for x in (broad[:rows, 1:129], broad.T[100:228].T[:rows], broad[:rows].T[:128].contiguous().T):
            assert_near(packed_linear(x, weight), expect(x, weight), 4)
        residual = broad[:rows, 200:224]
        expected = expect(broad[:rows, :128], weight, residual=residual)
        assert_near(packed_linear(broad[:rows, :128], weight, residual_TN=residual), expected, 4)


@pytest.mark.parametrize("columns", [33, 8])
def test_operands_that_no_kernel_unpacks_are_dequantised(
    columns: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("launch_packed_gemv", "launch_packed_gemm"):
        monkeypatch.setattr(triton_packed, name, None)
    weight = packed_weight(6, columns, device, group=8, dtype=torch.float32)
    x = noise(2, columns, device=device)
    torch.testing.assert_close(packed_linear(x, weight), functional.linear(x, weight.dense()))
    found = packed_gated_linear(x, weight)
    torch.testing.assert_close(found.double(), expect(x, weight, gated=True), rtol=1e-4, atol=1e-5)


def test_no_tokens_give_no_rows(device: torch.device) -> None:
    weight, x = packed_weight(6, 128, device), torch.empty((0, 128), dtype=torch.float16, device=device)
    assert packed_linear(x, weight).shape == (0, 6)
    assert packed_gated_linear(x, weight).shape == (0, 3)


def test_mismatched_shapes_and_dtypes_are_refused(device: torch.device) -> None:
    weight, x = packed_weight(6, 128, device), noise(2, 128, dtype=torch.float16, device=device)
    with pytest.raises(ValueError, match=r"weight has shape \(6, 128\); allowed for x \(2, 64\)"):
        packed_linear(x[:, :64], weight)
    with pytest.raises(ValueError, match=r"residual has shape \(2, 128\); allowed: \(2, 6\)"):
        packed_linear(x, weight, residual_TN=x)
    with pytest.raises(ValueError, match=r"x is torch\.float32; allowed without a norm: torch\.float16"):
        packed_gated_linear(x.float(), weight)


SHAPES = [(6144, 4096), (4096, 14336), (3072, 2048), (2048, 8192), (2560, 8192), (8192, 7168)]  # 8B, 1B, 70B by 4


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETING, reason="takes a GPU")
@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16, 17, 33, 64, 65, 100, 128, 200, 256, 300, 1000, 8192])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_every_size_of_real_models_equals_a_float64_matmul(rows: int, columns: int, tokens: int) -> None:
    device = torch.device("cuda")
    for dtype, (bits, group, zeros) in zip((torch.bfloat16, torch.float16) * 3, FORMATS, strict=False):
        weight = packed_weight(rows, columns, device, bits, group, zeros, dtype)
        x, residual = (noise(tokens, size, dtype=dtype, device=device) for size in (columns, rows))
        expected = expect(x, weight)
        assert_near(packed_linear(x, weight), expected, 8)
        before = residual.double()
        assert_near(packed_linear(x, weight, residual_TN=residual), expected + before, 8)
        gate, up = expected.chunk(2, 1)
        assert_near(packed_gated_linear(x, weight), functional.silu(gate) * up, 12)
        assert not weight.split_k_counters.any()


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETING, reason="takes a GPU")
@pytest.mark.parametrize("tokens", [1, 2, 16, 60, 200, 1000])
def test_graphs_replay_and_repeated_runs_give_equal_bits(tokens: int) -> None:
    device, dtype = torch.device("cuda"), torch.bfloat16
    gate_up, down = (packed_weight(*size, device, dtype=dtype) for size in ((8192, 2048), (2048, 4096)))
    norm = (noise(2048, dtype=dtype, device=device), 1e-5)

    def layer(stream_TN: Tensor) -> Tensor:
        return packed_linear(packed_gated_linear(stream_TN, gate_up, norm=norm), down, residual_TN=stream_TN.clone())

    x = noise(tokens, 2048, dtype=dtype, device=device)
    expected = layer(layer(x))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(layer(x))
    for _ in range(20):
        graph.replay()
        assert torch.equal(captured, expected)
        assert torch.equal(layer(layer(x)), expected)
    assert not gate_up.split_k_counters.any()
    assert not down.split_k_counters.any()
