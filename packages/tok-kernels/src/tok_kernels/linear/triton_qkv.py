"""Rotate and store queries, keys and values in the kernel that projects them, for few tokens.

Each program computes the two weight rows of a rotated pair, so that queries, keys and values are neither rounded nor
written to memory in between.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tok_kernels.batch import KVWrite
from tok_kernels.norm_rope_kv.triton_kv import cache_rows, cast_to_target


class Rotation(NamedTuple):
    """Arguments of a fused QKV projection for its rotation and its cache write.

    out                  [tokens, H × D], uninitialised: the rotated queries
    position, cache_row  [tokens], position of each token, and its cache row. They are no part of `arguments`, since
                         Triton specialises kernels on the alignment of a tuple's tensors, and theirs varies
    """

    out: Tensor
    position: Tensor
    cache_row: Tensor
    arguments: RopeArguments

    @property
    def half(self) -> int:
        """Half of the head size."""
        return self.arguments.cos_sin.shape[1] // 2


class RopeArguments(NamedTuple):
    """Arguments of a kernel that rotates pairs of results and writes keys and values to the cache.

    cos_sin         float32 [positions, head size], cosines and then sines
    k_rows, v_rows  [cache rows, kv_heads, head size], with strides between rows and heads
    """

    cos_sin: Tensor
    k_rows: Tensor
    k_row_stride: int
    k_head_stride: int
    v_rows: Tensor
    v_row_stride: int
    v_head_stride: int
    q_heads: int
    kv_heads: int


def can_fuse(write: KVWrite) -> bool:
    """Return whether the kernels can rotate and store: without QK norm and without scales of the cache."""
    cache = write.cache
    return write.norm is None and cache.k_scale is None and cache.k_token_scale is None and cache.k.shape[3] % 2 == 0


def make_rotation(write: KVWrite, weight_rows: int, dtype: torch.dtype) -> Rotation:
    """Return the rotation for a QKV weight of `weight_rows` rows; queries have `write.dtype`, or else `dtype`."""
    k_rows, v_rows = cache_rows(write.cache)
    kv_heads, head_dim = k_rows.shape[1:]
    heads = weight_rows // head_dim - 2 * kv_heads
    size = len(write.position_T), heads * head_dim
    (k_row_stride, k_head_stride, _), (v_row_stride, v_head_stride, _) = k_rows.stride(), v_rows.stride()
    arguments = RopeArguments(
        cos_sin=write.cos_sin_LD.contiguous(),
        k_rows=k_rows,
        k_row_stride=k_row_stride,
        k_head_stride=k_head_stride,
        v_rows=v_rows,
        v_row_stride=v_row_stride,
        v_head_stride=v_head_stride,
        q_heads=heads,
        kv_heads=kv_heads,
    )
    out = torch.empty(size, dtype=write.dtype or dtype, device=k_rows.device)
    return Rotation(out, write.position_T.contiguous(), write.index_T.contiguous(), arguments)


@triton.jit
def rotated_rows(pair: tl.tensor, second: tl.tensor, HALF: tl.constexpr) -> tl.tensor:
    """Return the weight rows of the first or second element of each pair: entries i and i + HALF of a head."""
    return pair + pair // HALF * HALF + second * HALF


@triton.jit
def load_angles(
    rope: tl.tuple, position: tl.tensor, pair: tl.tensor, inside: tl.tensor, HALF: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Load the cosine and sine of pairs of tokens at `position`; of pairs of values, 1 and 0."""
    ptrs = rope.cos_sin + position.to(tl.int64) * (2 * HALF) + pair % HALF
    is_rotated = inside & (pair < (rope.q_heads + rope.kv_heads) * HALF)
    return tl.load(ptrs, mask=is_rotated, other=1.0), tl.load(ptrs + HALF, mask=is_rotated, other=0.0)


@triton.jit
def store_rotated(
    first: tl.tensor,
    second: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    rope: tl.tuple,
    cache_row_ptr: tl.tensor,
    out_ptr: tl.tensor,
    out_token_stride: tl.tensor,
    token: tl.tensor,
    pair: tl.tensor,
    inside: tl.tensor,
    HALF: tl.constexpr,
) -> None:
    """Rotate pairs of queries and keys; store queries in `out`, keys and values in the cache. Values are not rotated.

    first, second  the pairs' elements; all tensors have broadcastable shapes
    inside         pairs of existing tokens and heads
    """
    head, i = pair // HALF, pair % HALF
    is_value = head >= rope.q_heads + rope.kv_heads
    # For values, sin is 0, and 0 times an infinity would be NaN.
    rotated_first = first * cos - tl.where(is_value, 0.0, second) * sin
    rotated_second = second * cos + tl.where(is_value, 0.0, first) * sin
    is_query = inside & (head < rope.q_heads)
    q_ptrs = out_ptr + token * out_token_stride + head * (2 * HALF) + i
    tl.store(q_ptrs, cast_to_target(rotated_first, out_ptr), mask=is_query)
    tl.store(q_ptrs + HALF, cast_to_target(rotated_second, out_ptr), mask=is_query)
    row = tl.load(cache_row_ptr + token, mask=inside, other=0).to(tl.int64)
    is_key = inside & (head >= rope.q_heads) & (head < rope.q_heads + rope.kv_heads)
    k_ptrs = rope.k_rows + row * rope.k_row_stride + (head - rope.q_heads) * rope.k_head_stride + i
    tl.store(k_ptrs, cast_to_target(rotated_first, rope.k_rows), mask=is_key)
    tl.store(k_ptrs + HALF, cast_to_target(rotated_second, rope.k_rows), mask=is_key)
    v_ptrs = rope.v_rows + row * rope.v_row_stride + (head - rope.q_heads - rope.kv_heads) * rope.v_head_stride + i
    tl.store(v_ptrs, cast_to_target(rotated_first, rope.v_rows), mask=inside & is_value)
    tl.store(v_ptrs + HALF, cast_to_target(rotated_second, rope.v_rows), mask=inside & is_value)
