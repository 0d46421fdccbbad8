"""Tests of the FP8 KV cache, with and without scales: rounding of written values, and attention over the cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from support.attention_cases import MIXED, Case, build, oracle
from support.interpreted import INTERPRETING, outside, rerun
from support.kv_writes import write_unrotated
from tok_kernels import Backend, LayerCache, QKNorm, rope_table
from tok_kernels import launch_config as config
from tok_kernels.attention.triton import attention, operands
from tok_kernels.backends.reference import ReferenceBackend
from tok_kernels.backends.triton import TritonBackend
from tok_kernels.norm_rope_kv.triton_rope import rope_and_write_kv

pytestmark = pytest.mark.usefixtures("small_device")
reference, triton = ReferenceBackend(), TritonBackend()

CPU, FP8 = torch.device("cpu"), torch.float8_e4m3fn
# ‖out − expected‖ / ‖expected‖ against float64 over the same cache. Kernels convert bfloat16 queries to float16.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 3e-3}
# The interpreter truncates results to bfloat16 instead of rounding them.
TRITON_DTYPES = [dtype for dtype in TOLERANCE if not (INTERPRETING and dtype == torch.bfloat16)]


@outside
def test_the_tests_of_this_file_pass_under_the_interpreter() -> None:
    rerun(__file__)


def representable() -> Tensor:
    """Return all 254 finite numbers of the type in ascending order, −0 and 0 included."""
    codes = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    return codes[codes.isfinite()].sort(stable=True).values


def written(values: Tensor, backend: Backend = reference) -> Tensor:
    """Write `values`, `[n]`, to an FP8 cache and return the cached numbers as float32."""
    x_TKD = torch.stack((values, -values), -1).unsqueeze(1)
    finite = x_TKD.isfinite()  # RoPE makes NaN of an infinity
    cache = empty_cache(len(values), 1, 2, values.device)
    index = torch.arange(len(values), device=values.device)
    write_unrotated(backend, torch.where(finite, x_TKD, 0.0), x_TKD, cache, index)
    stored_k, stored_v = (pages.float().flatten(0, 1)[: len(values)] for pages in (cache.k, cache.v))
    assert torch.equal(stored_k[finite], stored_v[finite])
    stored, negated = stored_v[:, 0].unbind(-1)
    torch.testing.assert_close(negated, -stored, rtol=0, atol=0, equal_nan=True)
    return stored


def empty_cache(
    rows: int, heads: int, size: int, device: torch.device, scales: tuple[Tensor, Tensor] | None = None
) -> LayerCache:
    shape = (-(-rows // 16), 16, heads, size)
    return LayerCache(*(torch.full(shape, torch.nan, device=device).to(FP8) for _ in range(2)), *(scales or ()))


def rounded(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return inputs and their expected FP8 values: at, between, halfway between and beyond the type's numbers."""
    exact = representable().double()
    low, high = exact[:-1], exact[1:]
    codes = torch.arange(127, dtype=torch.uint8).view(FP8).double()  # from 0 up, by magnitude
    even = codes[0::2]
    middle = (low + high) / 2
    to_even = torch.where(torch.isin(low.abs(), even), low, high)
    given = torch.cat((exact, middle, low * 0.51 + high * 0.49, low * 0.49 + high * 0.51))
    expected = torch.cat((exact, to_even, low, high))
    beyond = torch.tensor([449.0, 464.0, 465.0, 1e30, torch.inf, -1e4, -torch.inf], dtype=torch.float64)
    given, expected = torch.cat((given, beyond)), torch.cat((expected, beyond.sign() * 448.0))
    return given.float().to(device), expected.float().to(device)


def test_the_reference_casts_to_fp8_with_ties_to_even_and_saturation() -> None:
    given, expected = rounded(torch.device("cpu"))
    assert torch.equal(written(given), expected)
    assert written(torch.tensor([torch.nan])).isnan().all()


@pytest.mark.gpu
def test_triton_casts_to_fp8_as_the_reference_does() -> None:
    given, expected = rounded(torch.device("cuda"))
    assert torch.equal(written(given, triton), expected)
    assert written(torch.tensor([torch.nan], device="cuda"), triton).isnan().all()
    noise = torch.randn(50_000, device="cuda") * torch.logspace(-4, 4, 50_000, device="cuda")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(written(noise.to(dtype), triton), written(noise.to(dtype)))


def test_triton_writes_fp8_values_exactly_and_saturates_beyond_the_range(device: torch.device) -> None:
    # Exact inputs only: the interpreter does not round to FP8 as a device does.
    normal = representable()[representable().abs() >= 2.0**-6].to(device)
    beyond = torch.tensor([449.0, 1e30, torch.inf, -465.0, -torch.inf], device=device)
    given = torch.cat((normal, beyond))
    assert torch.equal(written(given, triton), torch.cat((normal, beyond.sign() * 448.0)))


def scales_of_two_heads(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return scales of keys and of values; powers of two for the interpreter, which does not round."""
    k_scale, v_scale = ([2.0, 0.5], [0.25, 4.0]) if INTERPRETING else ([2.7, 0.6], [0.3, 5.0])
    return torch.tensor(k_scale, device=device), torch.tensor(v_scale, device=device)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("norm", [False] if INTERPRETING else [False, True])
def test_rope_and_write_kv_fills_an_fp8_cache_as_the_reference_does(
    norm: bool, scaled: bool, device: torch.device
) -> None:
    def draw(*size: int) -> Tensor:
        drawn = torch.randn(size, generator=source).to(device)
        return representable_near(drawn) if INTERPRETING else drawn

    source = torch.Generator().manual_seed(1)
    q, k, v = draw(5, 4, 32), draw(5, 2, 32) * 256, draw(5, 2, 32) * 256
    weights = QKNorm(draw(32), draw(32) * 300, 1e-6) if norm else None
    # RoPE at position 0 is the identity, so that the interpreter need not round.
    position = torch.tensor([0, 0, 0, 0, 0] if INTERPRETING else [0, 99, 3, 3, 50], device=device)
    table, index = rope_table(32, 100, 10000.0).to(device), torch.tensor([70, 0, 127, 3, 50], device=device)
    scales = scales_of_two_heads(device) if scaled else None
    ours, theirs = (empty_cache(128, 2, 32, device, scales) for _ in range(2))
    rotated = rope_and_write_kv(q.clone(), k, v, position, table, ours, index, weights)
    expected = reference.rope_and_write_kv(q, k, v, position, table, theirs, index, weights)
    torch.testing.assert_close(rotated, expected)
    assert theirs.k.float().nan_to_num().abs().max() == 448.0  # some values saturate
    # Float32 arithmetic in another order may end on the other side of a tie, one FP8 step apart.
    for mine, other in ((ours.k, theirs.k), (ours.v, theirs.v)):
        torch.testing.assert_close(mine.float(), other.float(), rtol=0.125, atol=2.0**-9, equal_nan=True)
        assert float((mine != other).logical_and(~other.isnan()).float().mean()) < 0.01


def test_the_reference_divides_rows_by_head_scales_and_multiplies_queries() -> None:
    k, v = (torch.tensor(heads).view(1, 2, 1).expand(1, 2, 2) for heads in ([900.0, 3.0], [7.0, 0.001]))
    scales = torch.tensor([2.0, 0.25]), torch.tensor([0.5, 2.0**-12])
    cache, table = empty_cache(1, 2, 2, CPU, scales), rope_table(2, 1, 10000.0)
    rotated = reference.rope_and_write_kv(torch.ones(1, 4, 2), k, v, torch.tensor([0]), table, cache, torch.tensor([5]))
    assert cache.k[0, 5].tolist() == [[448.0, 448.0], [12.0, 12.0]]  # 450 saturates
    assert cache.v[0, 5].tolist() == [[14.0, 14.0], [4.0, 4.0]]  # without a scale, 0.001 would be 2⁻¹⁰
    assert rotated[0, :, 0].tolist() == [2.0, 2.0, 0.25, 0.25]


def test_triton_writes_rows_divided_by_their_heads_scales(device: torch.device) -> None:
    values = representable_near(torch.randn(70, 2, 32, generator=torch.Generator().manual_seed(2))).to(device)
    index = torch.randperm(70, generator=torch.Generator().manual_seed(3)).to(device)
    ours, theirs = (empty_cache(80, 2, 32, device, scales_of_two_heads(device)) for _ in range(2))
    write_unrotated(triton, values, values * 64, ours, index)
    write_unrotated(reference, values, values * 64, theirs, index)
    for mine, other in ((ours.k, theirs.k), (ours.v, theirs.v)):
        torch.testing.assert_close(mine.float(), other.float(), rtol=0.125, atol=2.0**-9, equal_nan=True)
        assert float((mine != other).logical_and(~other.isnan()).float().mean()) < 0.01


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ((torch.ones(2), None), "one of k_scale and v_scale is None; allowed: both or neither"),
        ((torch.ones(2), torch.ones(3)), r"v_scale is torch\.float32 \(3,\); allowed: float32 \(2,\)"),
        ((torch.ones(2).half(), torch.ones(2)), r"k_scale is torch\.float16 \(2,\); allowed: float32 \(2,\)"),
    ],
)
def test_scales_of_a_wrong_shape_or_dtype_are_refused(scales: tuple[Tensor, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        empty_cache(1, 2, 4, CPU, scales)


def representable_near(values: Tensor) -> Tensor:
    normal = torch.where(values.abs() < 2.0**-6, 1.0, values)
    return normal.to(FP8).float()


def float8(case: Case) -> Case:
    """Return the case over an FP8 copy of its cache, with NaN in the same places."""
    return replace(case, cache=LayerCache(case.cache.k.to(FP8), case.cache.v.to(FP8)))


def with_scales(case: Case) -> tuple[Case, Case]:
    """Return the case over an FP8 cache with scales, and the case that equals it over numbers without scales."""
    source = torch.Generator().manual_seed(9)
    k_scale, v_scale = (torch.exp(torch.randn(case.cache.k.shape[2], generator=source) * 2) for _ in range(2))
    k_scale, v_scale = k_scale.to(case.q.device), v_scale.to(case.q.device)
    narrow = float8(case).cache
    group = case.q.shape[1] // len(k_scale)
    factor = k_scale.repeat_interleave(group).unsqueeze(-1)
    q = (case.q.float() * factor).to(case.q.dtype)
    whole = LayerCache(*(x.double() * scale.view(-1, 1) for x, scale in ((narrow.k, k_scale), (narrow.v, v_scale))))
    return (
        replace(case, q=q, cache=LayerCache(narrow.k, narrow.v, k_scale, v_scale)),
        replace(case, q=q.double() / factor, cache=whole),
    )


def error(out: Tensor, case: Case) -> float:
    expected = torch.tensor(oracle(case)[0])
    return float((out.double().cpu() - expected).norm() / expected.norm())


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_reference_attention_over_an_fp8_cache_matches_a_float64_loop(dtype: torch.dtype, scaled: bool) -> None:
    case = build(MIXED, CPU, dtype)
    case, equal = with_scales(case) if scaled else (float8(case), float8(case))
    out = reference.attention(case.q, case.cache, case.batch, case.scale)
    assert out.dtype == dtype
    assert error(out, equal) < TOLERANCE[dtype]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dtype", TRITON_DTYPES, ids=str)
def test_triton_attention_over_an_fp8_cache_matches_a_float64_loop(
    dtype: torch.dtype, split: bool, scaled: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if split:
        monkeypatch.setattr(config, "MIN_DECODE_SPLIT_KEYS", 8)
        monkeypatch.setattr(config, "MIN_TILE_SPLIT_KEYS", 8)
    else:
        monkeypatch.setattr(config, "multiprocessors", lambda _device: 1)
    case = build(MIXED, device, dtype)
    case, equal = with_scales(case) if scaled else (float8(case), float8(case))
    out = attention(case.q, case.cache, case.batch, case.scale)
    assert out.dtype == dtype
    assert error(out, equal) < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_cascade_attention_of_full_batches_over_fp8_matches_the_reference(head_dim: int) -> None:
    runs = tuple((1 + i % 40, ((0, tuple(1 + j % 70 for j in range(20))),)) for i in range(100))
    shape = replace(MIXED, group=4, head_dim=head_dim, runs=runs, prefill=())
    case = float8(build(shape, torch.device("cuda"), torch.bfloat16))
    case = replace(case, batch=replace(case.batch, levels=case.batch.levels[:1]))
    expected = reference.attention(case.q.float(), case.cache, case.batch, case.scale)
    out = attention(case.q, case.cache, case.batch, case.scale)
    assert float((out.float() - expected).norm() / expected.norm()) < TOLERANCE[torch.bfloat16]


def test_an_fp8_cache_is_refused_on_a_device_without_fp8_conversion(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = float8(build(MIXED, device))
    monkeypatch.setattr(operands, "has_fp8", lambda _device: False)
    with pytest.raises(
        ValueError, match=r"dtype of k is torch\.float8_e4m3fn; allowed: float8 from compute capability"
    ):
        attention(case.q, case.cache, case.batch, case.scale)
