"""Implement the reference backend in plain torch, against which all other backends are tested.

It has a batch-invariant variant for CPUs.
"""

from __future__ import annotations

from tok_kernels.attention import invariant as invariant_attention
from tok_kernels.attention.interface import Phase
from tok_kernels.attention.reference import attention
from tok_kernels.linear import invariant as invariant_linear
from tok_kernels.linear.reference import ReferenceLinear
from tok_kernels.moe.reference import fused_experts, invariant_fused_experts, select_experts
from tok_kernels.ngrams.reference import accept_drafts, draft_tokens, learn_tokens, predict_tokens
from tok_kernels.norm_rope_kv.reference import rms_norm, rope_and_write_kv, silu_and_mul
from tok_kernels.norm_rope_kv.separate import SeparateProjection
from tok_kernels.sampling.reference.sampling import sample
from tok_kernels.slots.reference import decode_rows, record_sampled_tokens, set_draft_slots


class ReferenceBackend(ReferenceLinear, SeparateProjection):
    """A `tok_kernels.Backend` in plain torch, for any device."""

    name = "reference"
    needs_host_lengths: frozenset[Phase] = frozenset()
    capturable = False

    rms_norm = staticmethod(rms_norm)
    select_experts = staticmethod(select_experts)
    fused_experts = staticmethod(fused_experts)
    rope_and_write_kv = staticmethod(rope_and_write_kv)
    silu_and_mul = staticmethod(silu_and_mul)
    attention = staticmethod(attention)
    sample = staticmethod(sample)
    decode_rows = staticmethod(decode_rows)
    record_sampled_tokens = staticmethod(record_sampled_tokens)
    draft_tokens = staticmethod(draft_tokens)
    set_draft_slots = staticmethod(set_draft_slots)
    learn_tokens = staticmethod(learn_tokens)
    predict_tokens = staticmethod(predict_tokens)
    accept_drafts = staticmethod(accept_drafts)

    @staticmethod
    def max_pack_rows(group: int) -> int:
        return 1  # attention reads the keys of each row by themselves


class InvariantReferenceBackend(ReferenceBackend):
    """The reference backend with batch-invariant operations: the bits of a row depend on no other row of the step."""

    name = "reference, batch-invariant"

    linear = staticmethod(invariant_linear.linear)
    gated_linear = staticmethod(invariant_linear.gated_linear)
    silu_and_mul = staticmethod(invariant_linear.silu_and_mul)
    fused_experts = staticmethod(invariant_fused_experts)
    attention = staticmethod(invariant_attention.attention)
