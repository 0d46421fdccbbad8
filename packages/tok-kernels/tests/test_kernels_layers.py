"""Tests of the reference's norms, RoPE, gated activation and KV-cache writes against formulas and transformers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from support.kv_writes import write_unrotated
from support.noise import noise
from tok_kernels import BACKENDS, LayerCache, choose, rope_table

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("shape", [(5, 64), (1, 48), (3, 4, 32), (0, 16)])
def test_rms_norm_equals_that_of_transformers(shape: tuple[int, ...], device: torch.device) -> None:
    x, weight = noise(*shape, device=device) * 3, noise(shape[-1], device=device)
    theirs = LlamaRMSNorm(shape[-1], eps=1e-5).to(device)
    theirs.weight.data = weight
    torch.testing.assert_close(choose(device).rms_norm(x, weight, 1e-5), theirs(x).detach())


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_rounds_once_at_the_end(dtype: torch.dtype, device: torch.device) -> None:
    x, weight = noise(9, 64, dtype=dtype, device=device), noise(64, dtype=dtype, device=device)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    result = choose(device).rms_norm(x, weight, 1e-6)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)


def rotated(q: Tensor, k: Tensor, position: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rotated queries, and the rotated keys as the cache stores them."""
    cache = LayerCache(*(torch.empty_like(k).unsqueeze(0) for _ in range(2)))
    index = torch.arange(len(k), device=k.device)
    return choose(k.device).rope_and_write_kv(q.clone(), k, k, position, table, cache, index), cache.k[0]


def test_rope_equals_that_of_transformers(device: torch.device) -> None:
    config = LlamaConfig(hidden_size=96, num_attention_heads=4, head_dim=24, max_position_embeddings=128)
    q, k = noise(11, 4, 24, device=device), noise(11, 2, 24, device=device)
    position = torch.tensor([0, 1, 2, 3, 50, 127, 5, 5, 100, 64, 9], device=device)
    cos, sin = LlamaRotaryEmbedding(config).to(device)(q, position[None])
    theirs = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    ours = rotated(q, k, position, rope_table(24, 128, 10000.0).to(device))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other[0].transpose(0, 1), rtol=0, atol=2e-6)


def test_rope_makes_scores_depend_on_distance_alone(device: torch.device) -> None:
    table = rope_table(32, 600, 10000.0).to(device)
    q, k = noise(1, 1, 32, device=device), noise(1, 1, 32, device=device) + 1
    score = []
    for start in (0, 17, 400):
        position = torch.tensor([start + 100, start], device=device)
        turned_q, _ = rotated(q, k, position[:1], table)
        _, turned_k = rotated(q, k, position[1:], table)
        score.append((turned_q * turned_k).sum())
    torch.testing.assert_close(torch.stack(score), score[0].expand(3), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_keeps_the_dtype_and_does_not_modify_the_keys(dtype: torch.dtype, device: torch.device) -> None:
    q, k = noise(3, 2, 16, dtype=dtype, device=device), noise(3, 1, 16, dtype=dtype, device=device)
    kept, position = k.clone(), torch.tensor([4, 0, 9], dtype=torch.int32, device=device)
    table = rope_table(16, 10, 10000.0).to(device)
    turned, turned_k = rotated(q, k, position, table)
    exact, exact_k = rotated(q.float(), k.float(), position, table)
    assert turned.dtype == turned_k.dtype == dtype
    assert torch.equal(turned, exact.to(dtype))
    assert torch.equal(turned_k, exact_k.to(dtype))
    assert torch.equal(k, kept)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 10)])
def test_silu_and_mul_is_silu_of_the_first_half_times_the_second(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    x = noise(*shape, dtype=dtype, device=device) * 4
    half = shape[-1] // 2
    exact = F.silu(x[..., :half].double()) * x[..., half:].double()
    result = choose(device).silu_and_mul(x)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_and_write_kv_writes_only_the_given_cache_rows(dtype: torch.dtype, device: torch.device) -> None:
    all_layers = torch.full((2, 2, 5, 4, 3, 16), 7.0, dtype=dtype, device=device)
    cache = LayerCache(all_layers[1, 0], all_layers[1, 1])
    k, v = noise(3, 3, 16, device=device), noise(3, 3, 16, device=device) + 1
    write_unrotated(choose(device), k, v, cache, torch.tensor([19, 0, 6], device=device))
    expected = torch.full_like(all_layers, 7.0)
    for token, (page, offset) in enumerate([(4, 3), (0, 0), (1, 2)]):
        expected[1, 0, page, offset], expected[1, 1, page, offset] = k[token].to(dtype), v[token].to(dtype)
    assert torch.equal(all_layers, expected)


def test_rope_and_write_kv_refuses_a_cache_of_uneven_pages(device: torch.device) -> None:
    uneven = torch.zeros((5, 6, 3, 16), device=device)[:, :4]
    row, index = torch.zeros((1, 3, 16), device=device), torch.tensor([0], device=device)
    with pytest.raises(RuntimeError, match="view"):
        write_unrotated(choose(device), row, row, LayerCache(uneven, uneven), index)


def test_choose_on_a_cpu_allows_only_the_reference_backend() -> None:
    cpu = torch.device("cpu")
    assert BACKENDS == ("auto", "reference", "triton", "flashinfer")
    assert choose(cpu).name == choose(cpu, "reference").name == "reference"
    with pytest.raises(ValueError, match="backend is 'fast'; allowed: auto, reference, triton, flashinfer"):
        choose(cpu, "fast")
    with pytest.raises(ValueError, match="backend is 'triton'; allowed on cpu here: reference"):
        choose(cpu, "triton")


@pytest.mark.gpu
def test_choose_on_a_gpu_returns_triton_unless_reference_is_requested() -> None:
    gpu = torch.device("cuda")
    assert choose(gpu).name == choose(gpu, "triton").name == "triton"
    assert choose(gpu, "reference").name == "reference"
