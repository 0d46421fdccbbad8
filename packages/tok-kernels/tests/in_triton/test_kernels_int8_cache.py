"""Tests of the int8 KV cache: rounding of written keys and values by per-token scales, and attention over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from support.attention_cases import MIXED, Case, build, oracle
from support.interpreted import INTERPRETING, outside, rerun
from support.kv_writes import write_unrotated
from support.noise import noise
from tok_kernels import AttentionShape, Backend, LayerCache, QKNorm, kv_position_bytes, rope_table
from tok_kernels import launch_config as config
from tok_kernels.attention.flashinfer import adapters
from tok_kernels.attention.triton import attention, invariant, operands
from tok_kernels.backends.composed import compose
from tok_kernels.backends.reference import InvariantReferenceBackend, ReferenceBackend
from tok_kernels.backends.triton import TritonBackend
from tok_kernels.calibration import list_candidates
from tok_kernels.measure.steps import AttentionStep, new_problem
from tok_kernels.norm_rope_kv.triton_rope import rope_and_write_kv

pytestmark = pytest.mark.usefixtures("small_device")
reference = ReferenceBackend()

CPU, INT8, PAGE = torch.device("cpu"), torch.int8, 8
# ‖out − expected‖ / ‖expected‖ against float64 over the same cache.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
# The interpreter truncates results to bfloat16 instead of rounding them.
TRITON_DTYPES = [dtype for dtype in TOLERANCE if not (INTERPRETING and dtype == torch.bfloat16)]


@outside
def test_the_tests_of_this_file_pass_under_the_interpreter() -> None:
    rerun(__file__)


def empty_cache(pages: int, heads: int, size: int, device: torch.device, page_size: int = PAGE) -> LayerCache:
    numbers = torch.full((2, pages, page_size, heads, size), 99, dtype=INT8, device=device)
    scales = torch.full((2, pages, heads, page_size), torch.nan, device=device)
    return LayerCache(numbers[0], numbers[1], k_token_scale=scales[0], v_token_scale=scales[1])


def stored(pages: Tensor, scale: Tensor | None) -> Tensor:
    """Return the numbers that a cache stands for, `[rows, K, D]`."""
    assert scale is not None
    return (pages.float() * scale.transpose(1, 2).unsqueeze(-1)).flatten(0, 1)


def both(cache: LayerCache) -> tuple[Tensor, Tensor]:
    return stored(cache.k, cache.k_token_scale), stored(cache.v, cache.v_token_scale)


def of_both(cache: LayerCache) -> list[tuple[Tensor, Tensor]]:
    """Return the integers and scales of keys, and those of values."""
    scales = cache.k_token_scale, cache.v_token_scale
    return [(x, scale) for x, scale in zip((cache.k, cache.v), scales, strict=True) if scale is not None]


def test_the_reference_rounds_each_head_of_a_token_by_its_largest_number() -> None:
    k = torch.tensor([[[0.5, -2.0, 1.27, 0.0], [0.0, 0.0, 0.0, 0.0]]])
    cache = empty_cache(3, 2, 4, CPU)
    write_unrotated(reference, k, k * 1e-4, cache, torch.tensor([PAGE + 5]))
    assert cache.k[1, 5].tolist() == [[32, -127, 81, 0], [0, 0, 0, 0]]
    assert cache.v[1, 5].tolist() == [[32, -127, 81, 0], [0, 0, 0, 0]]
    (_, k_scale), (_, v_scale) = of_both(cache)
    torch.testing.assert_close(k_scale[1, :, 5], torch.tensor([2 / 127, 0.0]))
    torch.testing.assert_close(v_scale[1, :, 5], torch.tensor([2e-4 / 127, 0.0]))
    assert int(k_scale.isnan().sum()) == 3 * 2 * PAGE - 2  # no other scale is written


@pytest.mark.parametrize("backend", [reference, TritonBackend()], ids=["reference", "triton"])
@pytest.mark.parametrize("size", [64, 48])
def test_written_numbers_are_off_by_half_a_step_at_most(backend: Backend, size: int, device: torch.device) -> None:
    k, v = (noise(50, 3, size, device=device) * 10.0**power for power in (3, -3))
    k, v = (x * torch.logspace(-2, 2, 50, device=device).view(-1, 1, 1) for x in (k, v))
    index = torch.randperm(9 * PAGE, generator=torch.Generator().manual_seed(3))[:50].to(device)
    cache = empty_cache(9, 3, size, device)
    write_unrotated(backend, k, v, cache, index)
    for x, found in zip((k, v), both(cache), strict=True):
        step = x.abs().amax(-1, keepdim=True) / 127
        assert bool(((found[index] - x).abs() <= step * 0.5001).all())
        assert int(found.isfinite().all(-1).sum()) == 3 * 50  # no other row is written


@pytest.mark.parametrize("backend", [reference, TritonBackend()], ids=["reference", "triton"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter
def test_a_number_that_is_not_finite_makes_its_head_nan(backend: Backend, bad: float, device: torch.device) -> None:
    k = torch.ones(2, 2, 16, device=device)
    k[1, 0, 9] = bad
    cache = empty_cache(1, 2, 16, device)
    write_unrotated(backend, k, k, cache, torch.arange(2, device=device))
    for found in both(cache):
        assert bool(found[1, 0].isnan().all())
        assert bool((found[[0, 0, 1], [0, 1, 1]] == 1).all())


@pytest.mark.parametrize("size", [32, 24])
@pytest.mark.parametrize("norm", [False, True])
def test_rope_and_write_kv_fills_an_int8_cache_as_the_reference_does(
    norm: bool, size: int, device: torch.device
) -> None:
    q, k, v = noise(5, 6, size, device=device), noise(5, 3, size, device=device), noise(5, 3, size, device=device) * 9
    weights = QKNorm(noise(size, device=device), noise(size, device=device) * 3, 1e-6) if norm else None
    position = torch.tensor([0, 99, 3, 3, 50], device=device)
    table, index = rope_table(size, 100, 10000.0).to(device), torch.tensor([70, 0, 13, 3, 50], device=device)
    ours, theirs = (empty_cache(9, 3, size, device) for _ in range(2))
    rotated = rope_and_write_kv(q.clone(), k, v, position, table, ours, index, weights)
    expected = reference.rope_and_write_kv(q, k, v, position, table, theirs, index, weights)
    torch.testing.assert_close(rotated, expected)
    for (mine, my_scale), (other, scale) in zip(of_both(ours), of_both(theirs), strict=True):
        torch.testing.assert_close(my_scale, scale, equal_nan=True)
        # Float32 arithmetic in another order may end on the other side of a tie.
        different = (mine.int() - other.int()).abs()
        assert int(different.max()) <= 1
        assert float(different.float().mean()) < 0.002


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("entry", [3, 20])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_rotated_key_that_is_not_finite_is_stored_as_nan(bad: float, entry: int, device: torch.device) -> None:
    q, k = torch.ones(2, 2, 32, device=device), torch.ones(2, 1, 32, device=device)
    k[1, 0, entry] = bad
    position, table = torch.tensor([1, 2], device=device), rope_table(32, 4, 10000.0).to(device)
    cache = empty_cache(1, 1, 32, device)
    rope_and_write_kv(q, k, torch.ones_like(k), position, table, cache, position)
    found_k, found_v = both(cache)
    assert bool(found_k[2].isnan().all())
    assert bool(found_k[1].isfinite().all())
    assert bool((found_v[1:3] == 1).all())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v_token_scale": None}, "one of k_token_scale and v_token_scale is None; allowed: both or neither"),
        ({"k_token_scale": torch.ones(3, 4, 2)}, r"float32 \(3, 4, 2\); allowed: float32 \(3, 2, 4\)"),
        ({"k_token_scale": torch.ones(3, 2, 4).half()}, r"k_token_scale is torch\.float16"),
        ({"k_token_scale": None, "v_token_scale": None}, "the cache is torch.int8; allowed: int8 with k_token_scale"),
        ({"k_scale": torch.ones(2), "v_scale": torch.ones(2)}, "the cache is torch.int8; allowed: int8 with"),
        ({"k": torch.zeros(3, 4, 2, 16)}, "the cache is torch.float32; allowed: int8 with"),
    ],
)
def test_scales_that_do_not_belong_to_the_cache_are_refused(change: dict[str, Tensor], message: str) -> None:
    numbers, scales = torch.zeros(3, 4, 2, 16, dtype=INT8), torch.ones(3, 2, 4)
    cache = LayerCache(numbers, numbers, k_token_scale=scales, v_token_scale=scales)
    with pytest.raises(ValueError, match=message):
        replace(cache, **change)


def test_kernels_refuse_scales_that_are_not_contiguous() -> None:
    case, _ = int8(build(MIXED, CPU))
    pages, heads, page_size = case.cache.k_token_scale.shape  # type: ignore[union-attr]
    cache = replace(case.cache, k_token_scale=torch.ones(pages, page_size, heads).transpose(1, 2))
    k, index = torch.ones(1, 2, 32), torch.zeros(1, dtype=torch.int64)
    runs: list[Callable[[], object]] = [
        lambda: attention(case.q, cache, case.batch, case.scale),
        lambda: rope_and_write_kv(k, k, k, index, rope_table(32, 1, 1e4), cache, index),
    ]
    for run in runs:
        with pytest.raises(ValueError, match="contiguous tensors"):
            run()


def test_the_bytes_of_a_position_include_its_scales() -> None:
    cache = empty_cache(4, 3, 32, CPU)
    bytes_held = sum(x.nbytes + scale.nbytes for x, scale in of_both(cache))
    assert kv_position_bytes(3, 32, INT8) * 4 * PAGE == bytes_held
    assert kv_position_bytes(3, 32, torch.bfloat16) == 2 * 3 * 32 * 2


def int8(case: Case) -> tuple[Case, Case]:
    """Return the case over an int8 copy of its cache, with NaN in the same places, and over the copy's numbers.

    Scales of positions differ by powers of ten, so that every one counts.
    """
    factors = [torch.logspace(-2, power, case.cache.k.shape[0] * case.cache.page_size) for power in (0, 2)]
    k, v = (
        x
        * factor.to(x)[torch.randperm(len(factor), generator=torch.Generator().manual_seed(5))].view(*x.shape[:2], 1, 1)
        for x, factor in zip((case.cache.k, case.cache.v), factors, strict=True)
    )
    pages, page_size, heads, size = k.shape
    cache = empty_cache(pages, heads, size, k.device, page_size)
    index = torch.arange(pages * page_size, device=k.device)
    write_unrotated(reference, k.flatten(0, 1), v.flatten(0, 1), cache, index)
    dense = LayerCache(*(x.view(k.shape).double() for x in both(cache)))
    return replace(case, cache=cache), replace(case, cache=dense)


def error(out: Tensor, case: Case, window: int | None = None) -> float:
    expected = torch.tensor(oracle(case, window)[0])
    return float((out.double().cpu() - expected).norm() / expected.norm())


BACKENDS = [reference, InvariantReferenceBackend()]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_reference_attention_over_an_int8_cache_matches_a_float64_loop(
    dtype: torch.dtype, window: int | None, backend: ReferenceBackend
) -> None:
    case, dense = int8(build(MIXED, CPU, dtype))
    out = backend.attention(case.q, case.cache, case.batch, case.scale, window)
    assert out.dtype == dtype
    assert error(out, dense, window) < TOLERANCE[dtype]


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dtype", TRITON_DTYPES, ids=str)
def test_triton_attention_over_an_int8_cache_matches_a_float64_loop(
    dtype: torch.dtype, split: bool, window: int | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if split:
        monkeypatch.setattr(config, "MIN_DECODE_SPLIT_KEYS", 8)
        monkeypatch.setattr(config, "MIN_TILE_SPLIT_KEYS", 8)
    else:
        monkeypatch.setattr(config, "multiprocessors", lambda _device: 1)
    case, dense = int8(build(MIXED, device, dtype))
    out = attention(case.q, case.cache, case.batch, case.scale, window)
    assert out.dtype == dtype
    assert error(out, dense, window) < TOLERANCE[dtype]


@pytest.mark.parametrize("size", [24, 80])
def test_heads_that_are_padded_read_an_int8_cache_of_any_page_size(size: int, device: torch.device) -> None:
    for page_size in (4, 64):
        case, dense = int8(build(replace(MIXED, head_dim=size, page_size=page_size), device))
        assert error(attention(case.q, case.cache, case.batch, case.scale), dense) < 1e-6


def test_float16_keeps_products_of_weights_and_scales_that_it_cannot_hold(device: torch.device) -> None:
    case, dense = int8(build(MIXED, device, torch.float16))
    assert case.cache.v_token_scale is not None
    scale = case.cache.v_token_scale * 0 + 2.0**-17  # NaN stays where nothing was written
    cache = replace(case.cache, v_token_scale=scale)
    dense = replace(dense, cache=LayerCache(dense.cache.k, stored(case.cache.v, scale).view_as(dense.cache.v).double()))
    assert error(attention(case.q, cache, case.batch, case.scale), dense) < 2e-3


def test_gpus_without_float8_read_an_int8_cache_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operands, "has_fp8", lambda _device: False)
    monkeypatch.setattr(adapters, "find_spec", lambda _name: True)
    cuda, shape = torch.device("cuda"), AttentionShape(8, 2, 64, 16, 1, torch.bfloat16, INT8)
    assert operands.unsupported_reason(shape, cuda) is None
    assert operands.unsupported_reason(replace(shape, cache_dtype=torch.float8_e4m3fn), cuda) is not None
    candidates, rejected = list_candidates(shape, cuda)
    assert {one.name for one in candidates} == {"triton"}
    assert rejected["flashinfer"].startswith("cache_dtype is torch.int8; FlashInfer's kernels allow torch.bfloat16")
    reason = invariant.not_invariant_reason(shape)
    assert reason == "cache_dtype is torch.int8; batch_invariant allows torch.bfloat16 on a GPU"
    with pytest.raises(ValueError, match=r"'flashinfer'; allowed here: auto, triton, reference \(cache_dtype is torch"):
        compose(cuda, "flashinfer", shape, None)


def test_measured_steps_have_an_int8_cache_of_their_keys_and_values() -> None:
    step, outs = AttentionStep(rows=4, own=20, groups=2, prefix=32), list[Tensor]()
    for cache_dtype in (torch.float32, INT8):
        problem = new_problem(step, AttentionShape(4, 2, 32, 16, 1, torch.float32, cache_dtype), CPU, 1 << 20)
        assert problem.cache.k.dtype == cache_dtype
        outs.append(reference.attention(problem.q, problem.cache, problem.batch, problem.scale))
    assert 0 < float((outs[1] - outs[0]).norm() / outs[0].norm()) < 0.05


def test_batch_invariant_kernels_refuse_an_int8_cache(device: torch.device) -> None:
    case, _ = int8(build(MIXED, device))
    with pytest.raises(ValueError, match="the cache has per-token scales"):
        invariant.attention(case.q, case.cache, case.batch, case.scale)
