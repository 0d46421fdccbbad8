"""Write one token's key or value heads to the KV cache, quantised to the dtype of the cache."""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tok_kernels.batch import LayerCache
from tok_kernels.norm_rope_kv.reference import INT8_MAX, MIN_SCALED_ABSMAX

_FP8_MAX = tl.constexpr(448.0)  # largest finite float8_e4m3fn value
_INT8_MAX, _MIN_SCALED_ABSMAX = tl.constexpr(INT8_MAX), tl.constexpr(MIN_SCALED_ABSMAX)
# float32 numbers of this size are spaced by 1, so adding and subtracting it rounds to nearest, ties to even.
ROUNDING_OFFSET = tl.constexpr(1.5 * 2**23)


def cache_rows(cache: LayerCache) -> tuple[Tensor, Tensor]:
    """Return views of the cache's keys and values, `[pages × page_size, K, D]`: one row per position.

    Raises ValueError if the last axis is not contiguous.
    """
    # `reshape` may copy, and a write to the copy would be lost.
    k, v = (pages.view(-1, *pages.shape[2:]) for pages in (cache.k, cache.v))
    if k.stride(-1) != 1 or v.stride(-1) != 1:
        raise ValueError(f"the cache's last axis has strides {k.stride(-1)} and {v.stride(-1)}; allowed: 1")
    return k, v


def token_scales(cache: LayerCache) -> tuple[Tensor | None, Tensor | None]:
    """Return `k_token_scale` and `v_token_scale` of the cache. Raises ValueError if they are not contiguous."""
    scales = cache.k_token_scale, cache.v_token_scale
    if not all(scale is None or scale.is_contiguous() for scale in scales):
        raise ValueError("k_token_scale or v_token_scale is not contiguous; allowed: contiguous tensors")
    return scales


def contiguous_heads(x_THD: Tensor) -> Tensor:
    """Return the tensor itself, or a copy if the entries of a head are not contiguous."""
    return x_THD if x_THD.stride(-1) == 1 else x_THD.contiguous()


@triton.jit
def copy_heads(
    source: tl.tensor,
    source_head_stride: tl.tensor,
    target: tl.tensor,
    target_head_stride: tl.tensor,
    heads: tl.tensor,
    size: tl.tensor,
    scale: tl.tensor | None,
    token_scale: tl.tensor | None,
    row: tl.tensor,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Copy one token's heads, `[heads, size]`, from `source` to `target`, and cast them by `cast_to_target`.

    scale        one float32 divisor per head; None: no division
    token_scale  per-token scales of an int8 cache: each head is divided by its own scale, which is stored for cache
                 row `row`; None: the cache has another dtype
    """
    head, entry = tl.arange(0, HEADS)[:, None], tl.arange(0, SIZE)[None, :]
    inside = (head < heads) & (entry < size)
    value = tl.load(source + head * source_head_stride + entry, mask=inside)
    if scale is not None:
        value = value.to(tl.float32) * tl.div_rn(1.0, tl.load(scale + head, mask=head < heads, other=1.0))
    if token_scale is not None:
        value = tl.where(inside, value.to(tl.float32), 0.0)
        value *= store_token_scales(row_absmax(value), token_scale, row, heads, PAGE, HEADS)[:, None]
    tl.store(target + head * target_head_stride + entry, cast_to_target(value, target), mask=inside)


@triton.jit
def row_absmax(value: tl.tensor) -> tl.tensor:
    """Return the absolute maximum of each row; NaN if an entry of the row is not finite."""
    return tl.max(tl.abs(value), 1) + tl.sum(value * 0.0, 1)


@triton.jit
def store_token_scales(
    absmax: tl.tensor,
    token_scale: tl.tensor,
    row: tl.tensor,
    heads: tl.tensor,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
) -> tl.tensor:
    """Store the scale `absmax / 127` of each head for cache row `row`, and return its inverse, `127 / absmax`.

    The inverse is 0 for heads of zeros, and for heads with an entry that is not finite.
    """
    head = tl.arange(0, HEADS)
    offset = (row // PAGE * heads + head) * PAGE + row % PAGE
    tl.store(token_scale + offset, tl.div_rn(absmax, _INT8_MAX), mask=head < heads)
    divisor = tl.where(absmax > _MIN_SCALED_ABSMAX, absmax, 1.0)
    return tl.where(absmax > _MIN_SCALED_ABSMAX, tl.div_rn(_INT8_MAX, divisor), 0.0)


@triton.jit
def cast_to_target(value: tl.tensor, target: tl.tensor) -> tl.tensor:
    """Cast the values to the dtype that `target` points to, rounded to nearest, ties to even.

    For float8_e4m3fn, values are clamped to ±448. For int8, they must lie in ±127.
    """
    if target.dtype.element_ty == tl.int8:
        value = (value + ROUNDING_OFFSET) - ROUNDING_OFFSET
    if target.dtype.element_ty == tl.float8e4nv:
        value = value.to(tl.float32)
        value = tl.where(value > _FP8_MAX, _FP8_MAX, tl.where(value < -_FP8_MAX, -_FP8_MAX, value))  # NaN stays NaN
    return value.to(target.dtype.element_ty)
