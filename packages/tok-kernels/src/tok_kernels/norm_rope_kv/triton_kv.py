"""Write the heads of one token to its cache row, divided by scales and cast to the dtype of the cache."""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tok_kernels.batch import LayerCache
from tok_kernels.norm_rope_kv.reference import INT8_MAX, SMALLEST_SCALED

_FP8_MAX = tl.constexpr(448.0)  # largest float8_e4m3fn number
_INT8_MAX, _SMALLEST_SCALED = tl.constexpr(INT8_MAX), tl.constexpr(SMALLEST_SCALED)
# float32 numbers near this one are integers: adding and subtracting it rounds to nearest, ties to even.
ROUNDING_OFFSET = tl.constexpr(1.5 * 2**23)


def cache_rows(cache: LayerCache) -> tuple[Tensor, Tensor]:
    """Return the cache's keys and values as `[pages × page_size, K, D]`, one row per position, without a copy.

    Raises ValueError if the last axis is not dense.
    """
    # A view, because `reshape` may copy, and the write would be lost.
    k, v = (pages.view(-1, *pages.shape[2:]) for pages in (cache.k, cache.v))
    if k.stride(-1) != 1 or v.stride(-1) != 1:
        raise ValueError(f"the cache's last axis has strides {k.stride(-1)} and {v.stride(-1)}; allowed: 1")
    return k, v


def token_scales(cache: LayerCache) -> tuple[Tensor | None, Tensor | None]:
    """Return the scales of positions, if any. Raises ValueError if they are not contiguous."""
    scales = cache.k_token_scale, cache.v_token_scale
    if not all(scale is None or scale.is_contiguous() for scale in scales):
        raise ValueError("k_token_scale or v_token_scale is not contiguous; allowed: contiguous tensors")
    return scales


def dense_heads(x_THD: Tensor) -> Tensor:
    """Return the tensor itself, or a copy if the entries of a head are not contiguous."""
    return x_THD if x_THD.stride(-1) == 1 else x_THD.contiguous()


@triton.jit
def copy_heads(
    source: tl.tensor,
    source_head: tl.tensor,
    target: tl.tensor,
    target_head: tl.tensor,
    heads: tl.tensor,
    size: tl.tensor,
    scale: tl.tensor | None,
    token_scale: tl.tensor | None,
    row: tl.tensor,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Copy the heads of one token, `[heads, size]`, divided by `scale` if given, and cast by `cast_to_target`.

    With `token_scale`, the per-position scales of an int8 cache, compute the scales of this token's heads, divide the
    heads by them, and store the scales for cache row `row`.
    """
    head, entry = tl.arange(0, HEADS)[:, None], tl.arange(0, SIZE)[None, :]
    inside = (head < heads) & (entry < size)
    value = tl.load(source + head * source_head + entry, mask=inside)
    if scale is not None:
        value = value.to(tl.float32) * tl.div_rn(1.0, tl.load(scale + head, mask=head < heads, other=1.0))
    if token_scale is not None:
        value = tl.where(inside, value.to(tl.float32), 0.0)
        value *= store_scales(largest_of(value), token_scale, row, heads, PAGE, HEADS)[:, None]
    tl.store(target + head * target_head + entry, cast_to_target(value, target), mask=inside)


@triton.jit
def largest_of(value: tl.tensor) -> tl.tensor:
    """Return the largest absolute value of each row; NaN if any entry of the row is not finite."""
    return tl.max(tl.abs(value), 1) + tl.sum(value * 0.0, 1)


@triton.jit
def store_scales(
    largest: tl.tensor,
    token_scale: tl.tensor,
    row: tl.tensor,
    heads: tl.tensor,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
) -> tl.tensor:
    """Store the scale `largest / 127` of each head for cache row `row`, and return `127 / largest`.

    The factor is 0 for heads of zeros and for heads with an entry that is not finite.
    """
    head = tl.arange(0, HEADS)
    at = (row // PAGE * heads + head) * PAGE + row % PAGE
    tl.store(token_scale + at, tl.div_rn(largest, _INT8_MAX), mask=head < heads)
    divisor = tl.where(largest > _SMALLEST_SCALED, largest, 1.0)
    return tl.where(largest > _SMALLEST_SCALED, tl.div_rn(_INT8_MAX, divisor), 0.0)


@triton.jit
def cast_to_target(value: tl.tensor, target: tl.tensor) -> tl.tensor:
    """Return the value in the dtype that `target` points to.

    Values cast to float8_e4m3fn are clamped to ±448. Values cast to int8 must lie in ±127; they are rounded to nearest.
    """
    if target.dtype.element_ty == tl.int8:
        value = (value + ROUNDING_OFFSET) - ROUNDING_OFFSET
    if target.dtype.element_ty == tl.float8e4nv:
        value = value.to(tl.float32)
        value = tl.where(value > _FP8_MAX, _FP8_MAX, tl.where(value < -_FP8_MAX, -_FP8_MAX, value))  # NaN stays NaN
    return value.to(target.dtype.element_ty)
