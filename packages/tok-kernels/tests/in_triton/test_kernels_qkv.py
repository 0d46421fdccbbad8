"""Tests of QKV projections of few tokens, fused with rotary embedding and KV cache write, against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from support.interpreted import INTERPRETING, outside, rerun
from support.matmul_weights import scaled_weight
from support.noise import noise
from tok_kernels import KVWrite, LayerCache, QKNorm, ScaledWeight, rope_table, write_qkv
from tok_kernels.backends.reference import ReferenceBackend
from tok_kernels.backends.triton import InvariantTritonBackend
from tok_kernels.linear import triton_scaled
from tok_kernels.linear.triton import project_and_write_kv
from tok_kernels.linear.triton_config import MAX_FEW_ROWS, MAX_GEMV_TOKENS, FewRowsLaunch
from tok_kernels.linear.triton_few_rows import launch_few_rows
from tok_kernels.linear.triton_qkv import make_rotation
from tok_kernels.linear.triton_quantize import quantize_rows
from tok_kernels.linear.triton_scaled import scaled_project_and_write_kv

TOKENS = (1, MAX_GEMV_TOKENS, MAX_GEMV_TOKENS + 1, MAX_FEW_ROWS, MAX_FEW_ROWS + 1)
HEADS = [(4, 2, 16), (2, 2, 8), (3, 1, 40), (8, 1, 64), (2, 1, 6)]  # query heads, key heads, head size
HIDDEN, PAGE, POSITIONS = 88, 4, 300
EIGHT_BITS = [torch.int8] if INTERPRETING else [torch.int8, torch.float8_e4m3fn]
reference = ReferenceBackend()


@outside
def test_the_tests_of_this_file_pass_under_the_interpreter() -> None:
    rerun(__file__)


def write_of(
    tokens: int, kv_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype = torch.float16
) -> KVWrite:
    pages = tokens // PAGE + 2
    shape = (pages, PAGE, kv_heads, head_dim)
    cache = LayerCache(torch.full(shape, 7.0, device=device).to(dtype), torch.full(shape, 7.0, device=device).to(dtype))
    index = torch.randperm(pages * PAGE, generator=torch.Generator().manual_seed(0))[:tokens].to(device)
    position = torch.arange(tokens, device=device) * 37 % POSITIONS
    return KVWrite(position, rope_table(head_dim, POSITIONS, 1e4).to(device), cache, index)


def copied(write: KVWrite) -> KVWrite:
    return replace(write, cache=replace(write.cache, k=write.cache.k.clone(), v=write.cache.v.clone()))


def assert_written_alike(ours: KVWrite, theirs: KVWrite, tolerance: float) -> None:
    for mine, other in ((ours.cache.k, theirs.cache.k), (ours.cache.v, theirs.cache.v)):
        torch.testing.assert_close(mine.float(), other.float(), rtol=tolerance, atol=tolerance)


def weights(
    heads: tuple[int, int, int], device: torch.device, dtype: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor, tuple[Tensor, float]]:
    rows = (heads[0] + 2 * heads[1]) * heads[2]
    weight = noise(rows, HIDDEN, dtype=dtype, device=device) / HIDDEN**0.5
    if device.type == "cuda":
        torch.cuda.synchronize()  # with PDL a GEMM may read its weights before earlier kernels have ended
    return weight, noise(rows, dtype=dtype, device=device), (noise(HIDDEN, dtype=dtype, device=device), 1e-5)


def finished(weight: ScaledWeight) -> ScaledWeight:
    """Return the weight when it is written: with PDL a GEMM may read its weights before earlier kernels have ended."""
    if weight.values_NK.is_cuda:
        torch.cuda.synchronize()
    return weight


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_projection_rope_and_cache_write_equal_the_reference(
    tokens: int, heads: tuple[int, int, int], device: torch.device
) -> None:
    weight, bias, norm = weights(heads, device)
    x = noise(tokens, HIDDEN, dtype=torch.float16, device=device)
    for part in ("", "bias", "norm", "bias norm"):
        ours = write_of(tokens, *heads[1:], device)
        theirs = copied(ours)
        parts = (bias if "bias" in part else None), (norm if "norm" in part else None)
        q = project_and_write_kv(x, weight, parts[0], ours, norm=parts[1])
        expected = reference.project_and_write_kv(x, weight, parts[0], theirs, norm=parts[1])
        assert q.shape == (tokens, heads[0], heads[2])
        torch.testing.assert_close(q, expected, rtol=4e-3, atol=8e-3)
        assert_written_alike(ours, theirs, 8e-3)


@pytest.mark.parametrize("tokens", TOKENS)
def test_queries_are_rounded_to_their_dtype_and_keys_to_that_of_the_cache(tokens: int, device: torch.device) -> None:
    dtypes = [torch.float32] if INTERPRETING else [torch.bfloat16, torch.float8_e4m3fn]
    for cache_dtype in dtypes:
        weight, _, norm = weights((4, 2, 16), device)
        x = noise(tokens, HIDDEN, dtype=torch.float16, device=device)
        ours = replace(write_of(tokens, 2, 16, device, cache_dtype), dtype=torch.float32)
        theirs = copied(ours)
        q = project_and_write_kv(x, weight, None, ours, norm=norm)
        assert q.dtype == torch.float32
        torch.testing.assert_close(
            q, reference.project_and_write_kv(x, weight, None, theirs, norm=norm), rtol=4e-3, atol=8e-3
        )
        assert_written_alike(ours, theirs, 0.13 if cache_dtype == torch.float8_e4m3fn else 8e-3)


def test_an_infinite_value_leaves_its_neighbours_in_the_cache_as_they_are(device: torch.device) -> None:
    heads = (2, 1, 8)
    for tokens in (1, 3):
        weight, bias, _ = weights(heads, device)
        bias[-1] = float("inf")  # the last entry of the value
        write = write_of(tokens, *heads[1:], device)
        project_and_write_kv(noise(tokens, HIDDEN, dtype=torch.float16, device=device), weight, bias, write)
        rows = write.cache.v.flatten(0, 1)[write.index_T]
        assert rows[..., -1].isinf().all()
        assert rows[..., :-1].isfinite().all()


@pytest.mark.parametrize("tokens", [1, 5])
def test_qk_norms_and_scaled_caches_take_separate_kernels(tokens: int, device: torch.device) -> None:
    heads = (4, 2, 16)
    weight, bias, norm = weights(heads, device)
    x = noise(tokens, HIDDEN, dtype=torch.float16, device=device)
    plain = write_of(tokens, *heads[1:], device)
    scale = torch.tensor([0.5, 2.0], device=device)
    qk_norm = QKNorm(noise(16, device=device), noise(16, device=device), 1e-6)
    for ours in (
        replace(plain, norm=qk_norm),
        replace(plain, cache=replace(plain.cache, k_scale=scale, v_scale=scale)),
    ):
        theirs = copied(ours)
        q = project_and_write_kv(x, weight, bias, ours, norm=norm)
        expected = reference.project_and_write_kv(x, weight, bias, theirs, norm=norm)
        torch.testing.assert_close(q, expected, rtol=2e-2, atol=2e-2)
        assert_written_alike(ours, theirs, 2e-2)


@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
def test_8_bit_projection_equals_the_reference_on_its_rounded_rows(
    tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    inputs = 96
    for heads in ((4, 2, 16), (6, 1, 40), (2, 1, 8)):
        rows = (heads[0] + 2 * heads[1]) * heads[2]
        weight = finished(scaled_weight(rows, inputs, dtype, None, device))
        x, given_bias = noise(tokens, inputs, dtype=torch.float16, device=device), noise(rows, device=device).half()
        given_norm = noise(inputs, dtype=torch.float16, device=device), 1e-5
        for bias, norm in ((None, None), (given_bias, given_norm)):
            ours = write_of(tokens, *heads[1:], device)
            theirs = replace(copied(ours), dtype=torch.float16)
            q = scaled_project_and_write_kv(x, weight, bias, ours, norm=norm)
            exact = x.float() if norm is None else reference.rms_norm(x.float(), norm[0].float(), norm[1])
            if tokens > 1:
                quantized = quantize_rows(x, weight, norm)
                exact = quantized.values_TK.float() * quantized.scale_TG
            expected = reference.scaled_project_and_write_kv(exact, weight, bias, theirs)
            assert q.shape == (tokens, heads[0], heads[2])
            assert q.dtype == torch.float16
            torch.testing.assert_close(q, expected, rtol=1e-2, atol=2e-2)
            assert_written_alike(ours, theirs, 2e-2)


@pytest.mark.parametrize("splits", [2, 3])
def test_8_bit_projection_of_divided_inputs_equals_the_reference(splits: int, device: torch.device) -> None:
    heads, tokens, inputs = (6, 1, 40), 5, 320
    weight = finished(scaled_weight((heads[0] + 2 * heads[1]) * heads[2], inputs, torch.int8, None, device))
    x, bias = noise(tokens, inputs, dtype=torch.float16, device=device), noise(320, device=device).half()
    ours = write_of(tokens, *heads[1:], device)
    theirs = replace(copied(ours), dtype=torch.float16)
    quantized, rotation = quantize_rows(x, weight), make_rotation(ours, 320, x.dtype)
    launch = FewRowsLaunch(64, 64, 4, 2, splits=splits, prefetch=128)
    launch_few_rows(launch, quantized, weight, bias, None, gated=False, rotation=rotation)
    exact = quantized.values_TK.float() * quantized.scale_TG
    expected = reference.scaled_project_and_write_kv(exact, weight, bias, theirs)
    torch.testing.assert_close(rotation.out.view(expected.shape), expected, rtol=1e-2, atol=2e-2)
    assert_written_alike(ours, theirs, 2e-2)


@pytest.mark.parametrize("tokens", [1, 5])
def test_8_bit_projection_of_few_tokens_calls_no_separate_rotation(
    tokens: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = finished(scaled_weight(128, 96, torch.int8, None, device))
    write, x = write_of(tokens, 2, 16, device), noise(tokens, 96, dtype=torch.float16, device=device)
    scale = torch.ones(2, device=device)
    monkeypatch.setattr(triton_scaled, "rope_and_write_kv", None)
    scaled_project_and_write_kv(x, weight, None, write)
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        scaled_project_and_write_kv(
            x, weight, None, replace(write, cache=replace(write.cache, k_scale=scale, v_scale=scale))
        )


@pytest.mark.parametrize("tokens", [1, 3])
def test_the_batch_invariant_backend_projects_and_writes_separately(tokens: int, device: torch.device) -> None:
    backend = InvariantTritonBackend.__new__(InvariantTritonBackend)  # leaves the process's GEMMs as they are
    weight, bias, norm = weights((4, 2, 16), device)
    x = noise(tokens, HIDDEN, dtype=torch.float16, device=device)
    ours = write_of(tokens, 2, 16, device)
    theirs = copied(ours)
    q = backend.project_and_write_kv(x, weight, bias, ours, norm=norm)
    expected = write_qkv(backend.rope_and_write_kv, backend.linear(x, weight, bias, norm=norm), theirs)
    assert torch.equal(q, expected)
    assert torch.equal(ours.cache.k, theirs.cache.k)
    assert torch.equal(ours.cache.v, theirs.cache.v)
    fused = copied(ours)
    q = project_and_write_kv(x, weight, bias, fused, norm=norm)
    assert not torch.equal(fused.cache.k, ours.cache.k)


def test_a_projection_of_no_tokens_writes_nothing(device: torch.device) -> None:
    weight, bias, norm = weights((4, 2, 16), device)
    write = write_of(0, 2, 16, device)
    x = noise(0, HIDDEN, dtype=torch.float16, device=device)
    assert project_and_write_kv(x, weight, bias, write, norm=norm).shape == (0, 4, 16)
    assert (write.cache.k == 7.0).all()
