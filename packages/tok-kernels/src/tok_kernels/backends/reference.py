"""Implement the reference backend in plain torch for any device: the CPU's backend, and the standard for the others."""

from __future__ import annotations

import torch
from torch import Tensor

from tok_kernels.attention.phases import Phase
from tok_kernels.attention.reference import attention, attention_with_lse
from tok_kernels.batch import LayerCache, QKNorm
from tok_kernels.linear.reference import gated_linear, linear
from tok_kernels.norm_rope_kv.reference_activation import silu_and_mul
from tok_kernels.norm_rope_kv.reference_kv import write_kv
from tok_kernels.norm_rope_kv.reference_norm import rms_norm
from tok_kernels.norm_rope_kv.reference_rope import rope
from tok_kernels.sampling.reference.inversion import invert_cdf
from tok_kernels.sampling.reference.philox import philox4x32, uniform
from tok_kernels.sampling.reference.sampling import sample
from tok_kernels.slots.reference import decode_rows, record_sampled_tokens

__all__ = [
    "ReferenceBackend",
    "attention",
    "attention_with_lse",
    "gated_linear",
    "invert_cdf",
    "linear",
    "philox4x32",
    "rms_norm",
    "rope",
    "sample",
    "silu_and_mul",
    "uniform",
    "write_kv",
]


def rope_and_write_kv(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    position_T: Tensor,
    cos_sin_LD: Tensor,
    cache: LayerCache,
    index_T: Tensor,
    norm: QKNorm | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Rotate q and k, write the rotated k and v to the cache, and return the rotated q; see `Backend`."""
    dtype = dtype or q_THD.dtype
    q_THD, k_TKD = q_THD.float(), k_TKD.float()
    if norm is not None:
        q_THD, k_TKD = rms_norm(q_THD, norm.q_D, norm.eps), rms_norm(k_TKD, norm.k_D, norm.eps)
    q_THD, k_TKD = rope(q_THD, k_TKD, position_T, cos_sin_LD)
    write_kv(k_TKD, v_TKD, cache, index_T)
    return q_THD.to(dtype)


class ReferenceBackend:
    """A `tok_kernels.Backend` in plain torch; its operations are the functions of the same names."""

    name = "reference"
    needs_host_lengths: frozenset[Phase] = frozenset()
    capturable = False

    rms_norm = staticmethod(rms_norm)
    linear = staticmethod(linear)
    gated_linear = staticmethod(gated_linear)
    rope = staticmethod(rope)
    rope_and_write_kv = staticmethod(rope_and_write_kv)
    silu_and_mul = staticmethod(silu_and_mul)
    write_kv = staticmethod(write_kv)
    attention = staticmethod(attention)
    sample = staticmethod(sample)
    decode_rows = staticmethod(decode_rows)
    record_sampled_tokens = staticmethod(record_sampled_tokens)
