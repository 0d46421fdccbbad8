"""Tests of Triton norms, RoPE, activation and KV-cache writes against the reference, on ragged sizes and views."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from support.interpreted import INTERPRETING, outside, rerun
from support.kv_writes import write_unrotated
from support.noise import noise
from tok_kernels import LayerCache, QKNorm, rope_table
from tok_kernels.backends.reference import ReferenceBackend
from tok_kernels.backends.triton import TritonBackend
from tok_kernels.norm_rope_kv.triton_activation import silu_and_mul
from tok_kernels.norm_rope_kv.triton_norm import rms_norm
from tok_kernels.norm_rope_kv.triton_rope import rope_and_write_kv

reference = ReferenceBackend()

# The interpreter truncates float32 to bfloat16 instead of rounding it.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (not INTERPRETING)


@outside
def test_the_tests_of_this_file_pass_under_the_interpreter() -> None:
    rerun(__file__)


def assert_near(result: Tensor, expected: Tensor) -> None:
    """Check a difference of at most a reordered float32 sum and one rounding to the dtype."""
    assert result.dtype == expected.dtype
    step = torch.finfo(expected.dtype).eps
    torch.testing.assert_close(result.double(), expected.double(), rtol=max(step, 1e-6), atol=2e-6)


def fused(tokens: int, heads: int, kv_heads: int, size: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return a fused QKV output and its views as queries, keys and values."""
    product = noise(tokens, (heads + 2 * kv_heads) * size, dtype=dtype, device=device)
    rows = product.view(tokens, heads + 2 * kv_heads, size)
    return [product, rows[:, :heads], rows[:, heads : heads + kv_heads], rows[:, heads + kv_heads :]]


def poisoned_cache(pages: int, page: int, kv_heads: int, size: int, like: Tensor) -> tuple[Tensor, LayerCache]:
    """Return the memory of two layers, filled with NaN, and the cache of the second layer."""
    memory = torch.full((2, 2, pages, page, kv_heads, size), torch.nan, dtype=like.dtype, device=like.device)
    return memory, LayerCache(memory[1, 0], memory[1, 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 64), (1, 48), (3, 4, 32), (0, 16), (2, 2304)])
def test_rms_norm_equals_the_reference(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    x, weight = noise(*shape, dtype=dtype, device=device) * 3, noise(shape[-1], dtype=dtype, device=device)
    assert_near(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


def test_rms_norm_returns_the_requested_dtype(device: torch.device) -> None:
    x, weight = (noise(*size, dtype=torch.bfloat16, device=device) for size in ((5, 64), (64,)))
    expected = reference.rms_norm(x.float(), weight, 1e-5).half()
    for norm in (rms_norm, reference.rms_norm):
        assert_near(norm(x, weight, 1e-5, torch.float16), expected)


def test_rms_norm_of_huge_and_tiny_rows_does_not_overflow_or_underflow(device: torch.device) -> None:
    x = noise(2, 64, dtype=torch.float32, device=device) * torch.tensor([[1e15], [1e-15]], device=device)
    weight = torch.ones(64, dtype=torch.bfloat16, device=device)
    assert_near(rms_norm(x, weight, 1e-38), reference.rms_norm(x, weight, 1e-38))


def test_rms_norm_takes_strided_rows(device: torch.device) -> None:
    wide = noise(6, 100, dtype=torch.float16, device=device)
    x, weight = wide[:, :40], wide[0, 20:60].clone()
    assert_near(rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
    assert_near(rms_norm(wide.T[:40], wide[0, :6].clone(), 1e-6), reference.rms_norm(wide.T[:40], wide[0, :6], 1e-6))


def test_rms_norm_refuses_weights_of_another_size(device: torch.device) -> None:
    x = noise(4, 32, dtype=torch.float32, device=device)
    with pytest.raises(ValueError, match=r"weight has shape \(16,\); allowed: \(32,\)"):
        rms_norm(x, x[0, :16], 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 24), (3, 1, 64), (6, 3, 24), (32, 8, 16)])
def test_rope_and_write_kv_equals_the_reference(
    heads: int, kv_heads: int, size: int, dtype: torch.dtype, device: torch.device
) -> None:
    product, q, k, v = fused(3, heads, kv_heads, size, dtype, device)
    memory, cache = poisoned_cache(5, 4, kv_heads, size, like=q)
    expected, their_cache = poisoned_cache(5, 4, kv_heads, size, like=q)
    table = rope_table(size, 300, 10000.0).to(device)
    position = torch.tensor([9, 0, 290], dtype=torch.int32, device=device)
    index = torch.tensor([19, 0, 6], device=device)
    turned_q = reference.rope_and_write_kv(q, k, v, position, table, their_cache, index)
    rest = product[:, heads * size :].clone()
    rope_and_write_kv(q, k, v, position, table, cache, index)
    assert_near(q, turned_q)
    assert torch.equal(product[:, heads * size :], rest)
    assert_near(cache.k.nan_to_num(7.0), their_cache.k.nan_to_num(7.0))
    assert torch.equal(cache.v.nan_to_num(7.0), their_cache.v.nan_to_num(7.0))
    assert torch.equal(memory.isnan(), expected.isnan())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 24), (3, 1, 64), (32, 8, 16)])
def test_rope_and_write_kv_applies_the_qk_norm_before_rope(
    heads: int, kv_heads: int, size: int, dtype: torch.dtype, device: torch.device
) -> None:
    _, q, k, v = fused(3, heads, kv_heads, size, dtype, device)
    q *= 30.0
    norm = QKNorm(noise(size, dtype=dtype, device=device), noise(size, dtype=dtype, device=device) + 1, 1e-6)
    _, cache = poisoned_cache(5, 4, kv_heads, size, like=q)
    _, expected = poisoned_cache(5, 4, kv_heads, size, like=q)
    table, position = rope_table(size, 300, 10000.0).to(device), torch.tensor([9, 0, 290], device=device)
    index = torch.tensor([19, 0, 6], device=device)
    turned_q = reference.rope_and_write_kv(q, k, v, position, table, expected, index, norm)
    rope_and_write_kv(q, k, v, position, table, cache, index, norm)
    # The norm's last bit may differ, and RoPE mixes it into smaller entries.
    step = max(torch.finfo(dtype).eps, 1e-6) * 8
    torch.testing.assert_close(q, turned_q, rtol=step, atol=step)
    torch.testing.assert_close(cache.k, expected.k, rtol=step, atol=step, equal_nan=True)
    torch.testing.assert_close(cache.v, expected.v, rtol=0, atol=0, equal_nan=True)


def test_rope_and_write_kv_refuses_qk_norms_of_another_size(device: torch.device) -> None:
    _, q, k, v = fused(3, 2, 2, 32, torch.float32, device)
    _, cache = poisoned_cache(1, 4, 2, 32, like=q)
    table, index = rope_table(32, 10, 10000.0).to(device), torch.arange(3, device=device)
    norm = QKNorm(q[0, 0], k[0, 0, :16], 1e-6)
    with pytest.raises(ValueError, match=r"the norm weight of k has shape \(16,\); allowed: \(32,\)"):
        rope_and_write_kv(q, k, v, index, table, cache, index, norm)


def test_rope_and_write_kv_converts_to_the_dtype_of_the_cache(device: torch.device) -> None:
    _, q, k, v = fused(3, 2, 2, 32, torch.float32, device)
    memory, cache = poisoned_cache(1, 4, 2, 32, like=q.half())
    table, position = rope_table(32, 10, 10000.0).to(device), torch.arange(3, device=device)
    _, wide = poisoned_cache(1, 4, 2, 32, like=q)
    rope_and_write_kv(q.clone(), k, v, position, table, wide, position + 1)
    rope_and_write_kv(q, k, v, position, table, cache, position + 1)
    assert torch.equal(memory[1, 0, 0, 1:], wide.k[0, 1:].half())
    assert torch.equal(memory[1, 1, 0, 1:], v.half())


@pytest.mark.parametrize("norm", [False, True])
def test_rope_and_write_kv_rounds_float32_inputs_once(norm: bool, device: torch.device) -> None:
    product, q, k, v = fused(3, 6, 2, 32, torch.float32, device)
    weights = QKNorm(noise(32, dtype=torch.float16, device=device), q[0, 0].half(), 1e-6) if norm else None
    memory, cache = poisoned_cache(2, 4, 2, 32, like=q.half())
    _, expected = poisoned_cache(2, 4, 2, 32, like=q.half())
    table, position = rope_table(32, 10, 10000.0).to(device), torch.tensor([7, 0, 4], device=device)
    kept, index = product.clone(), torch.tensor([5, 0, 2], device=device)
    arguments = (q, k, v, position, table)
    turned = reference.rope_and_write_kv(*arguments, expected, index, weights, torch.float16)
    found = rope_and_write_kv(*arguments, cache, index, weights, torch.float16)
    assert found.dtype == turned.dtype == torch.float16
    assert found.is_contiguous()
    assert torch.equal(product, kept)
    if weights is None:
        wide = rope_and_write_kv(q.clone(), k, v, position, table, cache, index)
        assert torch.equal(found, wide.half())
    for ours, theirs in ((found, turned), (cache.k, expected.k), (cache.v, expected.v)):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6, equal_nan=True)
    assert memory[0].isnan().all()


def test_rope_writes_bfloat16_over_float16_queries_in_place(device: torch.device) -> None:
    product, q, k, v = fused(3, 6, 2, 32, torch.float16, device)
    product.mul_(30_000.0).clamp_(-60_000.0, 60_000.0)
    memory, cache = poisoned_cache(2, 4, 2, 32, like=q.bfloat16())
    _, expected = poisoned_cache(2, 4, 2, 32, like=q.bfloat16())
    table, position = rope_table(32, 10, 10000.0).to(device), torch.tensor([7, 0, 4], device=device)
    rest, index = product[:, 6 * 32 :].clone(), torch.tensor([5, 0, 2], device=device)
    arguments = (q, k, v, position, table)
    turned = reference.rope_and_write_kv(*arguments, expected, index, dtype=torch.bfloat16)
    exact = reference.rope_and_write_kv(q.float(), k, v, position, table, expected, index)
    assert torch.equal(turned, exact.bfloat16())
    assert turned.abs().max() > torch.finfo(torch.float16).max > product.abs().max()
    found = rope_and_write_kv(*arguments, cache, index, dtype=torch.bfloat16)
    assert (found.data_ptr(), found.dtype) == (q.data_ptr(), torch.bfloat16)
    assert torch.equal(product[:, 6 * 32 :], rest)
    for ours, theirs in ((found, turned), (cache.k, expected.k), (cache.v, expected.v)):
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=1e-6, equal_nan=True)  # the interpreter truncates
    assert memory[0].isnan().all()


def test_rope_and_write_kv_refuses_queries_with_a_strided_last_axis(device: torch.device) -> None:
    _, _, k, v = fused(3, 2, 2, 32, torch.float32, device)
    _, cache = poisoned_cache(1, 4, 2, 32, like=k)
    table, index = rope_table(32, 10, 10000.0).to(device), torch.arange(3, device=device)
    with pytest.raises(ValueError, match="q has a stride of 2 along its last axis; allowed: 1"):
        rope_and_write_kv(torch.zeros((3, 32, 2), device=device).transpose(1, 2), k, v, index, table, cache, index)


def test_rope_and_write_kv_refuses_a_cache_of_uneven_pages(device: torch.device) -> None:
    uneven = torch.zeros((5, 6, 3, 16), device=device)[:, :4]
    row, index = torch.zeros((1, 3, 16), device=device), torch.tensor([0], device=device)
    with pytest.raises(RuntimeError, match="view"):
        write_unrotated(TritonBackend(), row, row, LayerCache(uneven, uneven), index)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 10), (2, 2100)])
def test_silu_and_mul_equals_the_reference(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    x = noise(*shape, dtype=dtype, device=device) * 4
    assert_near(silu_and_mul(x), reference.silu_and_mul(x))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # of the interpreter's NumPy
def test_silu_and_mul_of_extreme_values_equals_the_reference(device: torch.device) -> None:
    gate = torch.tensor([[-1e38, -200.0, -88.0, 0.0, 88.0, 1e38]], device=device)
    x = torch.cat((gate, torch.ones_like(gate)), dim=-1)
    torch.testing.assert_close(silu_and_mul(x), reference.silu_and_mul(x), rtol=1e-6, atol=1e-35)


def test_silu_and_mul_refuses_an_odd_width(device: torch.device) -> None:
    with pytest.raises(ValueError, match="gate_up has a last axis of 7; allowed: even numbers"):
        silu_and_mul(torch.zeros((2, 7), device=device))


def test_layer_kernels_of_zero_tokens_write_nothing(device: torch.device) -> None:
    _, q, k, v = fused(0, 2, 1, 32, torch.float32, device)
    memory, cache = poisoned_cache(1, 4, 1, 32, like=q)
    table, none = rope_table(32, 10, 10000.0).to(device), torch.empty(0, dtype=torch.int64, device=device)
    rope_and_write_kv(q, k, v, none, table, cache, none)
    assert memory.isnan().all()
    assert silu_and_mul(torch.empty((0, 8), device=device)).shape == (0, 4)


@pytest.mark.gpu
def test_layer_kernels_over_thousands_of_tokens_equal_the_reference() -> None:
    device, dtype, tokens = torch.device("cuda"), torch.bfloat16, 8192
    x, weight = noise(tokens, 2048, dtype=dtype, device=device), noise(2048, dtype=dtype, device=device)
    assert_near(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    gate_up = noise(tokens, 16384, dtype=dtype, device=device)
    assert_near(silu_and_mul(gate_up), reference.silu_and_mul(gate_up))
    _, q, k, v = fused(tokens, 32, 8, 128, dtype, device)
    position = torch.randint(0, 5000, (tokens,), generator=torch.Generator().manual_seed(1)).to(device)
    table, index = rope_table(128, 5000, 500000.0).to(device), torch.randperm(tokens).to(device)
    memory, cache = poisoned_cache(tokens // 16, 16, 8, 128, like=q)
    _, expected = poisoned_cache(tokens // 16, 16, 8, 128, like=q)
    turned_q = reference.rope_and_write_kv(q, k, v, position, table, expected, index)
    rope_and_write_kv(q, k, v, position, table, cache, index)
    assert_near(q, turned_q)
    assert_near(cache.k, expected.k)
    assert torch.equal(cache.v, expected.v)
    assert memory[0].isnan().all()
