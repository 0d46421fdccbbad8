"""Attention over an 8-bit cache finds one key among 100 000 that its query matches."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import Tensor

from support.kv_writes import write_unrotated
from tok_kernels import AttentionBatch, AttentionShape, HostLengths, LayerCache
from tok_kernels.attention.interface import PhaseKernel
from tok_kernels.attention.reference import attention as reference
from tok_kernels.backends.reference import ReferenceBackend

POSITIONS, NEEDLE, PAGE = 100_000, 61_803, 16
KV_HEADS, GROUP, SIZE = 2, 4, 128
SCALE = SIZE**-0.5
FP8 = torch.float8_e4m3fn
NEEDLE_FILL, OTHERS_FILL = 5.0, -3.0


def haystack(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, LayerCache, AttentionBatch]:
    """Return a decode row whose query is parallel to one key, with a score of 16 above the others' largest.

    The needle's values are 5, all others' are -3. By their scales, keys and values use the range of float8.
    """
    source = torch.Generator().manual_seed(0)
    pages = -(-POSITIONS // PAGE)
    k = torch.randn((pages * PAGE, KV_HEADS, SIZE), generator=source)
    v = torch.full_like(k, OTHERS_FILL)
    v[NEEDLE] = NEEDLE_FILL
    scores_LK = torch.einsum("lkd,kd->lk", k, k[NEEDLE]) * SCALE
    top_K = scores_LK[NEEDLE].clone()
    scores_LK[NEEDLE] = -torch.inf
    # All other keys together have at most 100 000 · e⁻¹⁶ = 0.011 of the needle's weight.
    q_KD = k[NEEDLE] * 16 / (top_K - scores_LK.amax(0)).unsqueeze(-1)
    k_scale, v_scale = torch.tensor([0.011, 0.013]), torch.tensor([0.02, 0.03])
    narrow = torch.zeros((pages, PAGE, KV_HEADS, SIZE)).to(FP8)
    cache = LayerCache(narrow, narrow.clone(), k_scale, v_scale)
    write_unrotated(ReferenceBackend(), k, v, cache, torch.arange(pages * PAGE))
    cache = LayerCache(*(x.to(device) for x in (cache.k, cache.v, k_scale, v_scale)))
    q = (q_KD * k_scale.unsqueeze(-1)).repeat_interleave(GROUP, 0).unsqueeze(0)

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    order = torch.arange(pages, dtype=torch.int32, device=device).unsqueeze(0)
    q_len, kv_len, kv_start = (np.array([count], np.int32) for count in (1, POSITIONS, 0))
    batch = AttentionBatch(
        *(order, ints(0), ints(0, 1), ints(POSITIONS), ints(0)),
        num_decode=1,
        max_q=1,
        max_kv=POSITIONS,
        host=HostLengths(q_len, kv_len, kv_start),
    )
    return q.to(device, dtype), cache, batch


def assert_found(out: Tensor) -> None:
    rounding = NEEDLE_FILL / 16  # of a value with three bits after the first
    assert float((out.float() - NEEDLE_FILL).abs().max()) < rounding + 0.011 * (NEEDLE_FILL - OTHERS_FILL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_reference_finds_one_key_among_100000(dtype: torch.dtype) -> None:
    q, cache, batch = haystack(torch.device("cpu"), dtype)
    assert_found(reference(q, cache, batch, SCALE))


def triton() -> PhaseKernel:
    from tok_kernels.attention.triton.attention import triton_decode_kernel

    return triton_decode_kernel


def flashinfer() -> PhaseKernel:
    if find_spec("flashinfer") is None:
        pytest.skip("needs Linux on x86-64, which FlashInfer runs on")
    from tok_kernels.attention.flashinfer import Adapters

    shape = AttentionShape(KV_HEADS * GROUP, KV_HEADS, SIZE, PAGE, 1, torch.bfloat16, FP8)
    return Adapters(shape, torch.device("cuda")).decode(tensor_cores=True)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::Warning:flashinfer.*")
@pytest.mark.parametrize("kernel", [triton, flashinfer])
def test_gpu_kernels_find_one_key_among_100000(kernel: Callable[[], PhaseKernel]) -> None:
    q, cache, batch = haystack(torch.device("cuda"), torch.bfloat16)
    out = torch.empty_like(q)
    kernel()(q, cache, batch, SCALE, out)
    assert_found(out)
