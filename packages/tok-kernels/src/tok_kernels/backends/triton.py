"""Implement the backend of Triton kernels for CUDA devices."""

from __future__ import annotations

from tok_kernels.attention.interface import Phase
from tok_kernels.attention.triton import invariant as invariant_attention
from tok_kernels.attention.triton.attention import attention
from tok_kernels.attention.triton.decode import max_pack_rows
from tok_kernels.linear import triton_invariant as invariant_linear
from tok_kernels.linear.triton import gated_linear, linear, project_and_write_kv
from tok_kernels.linear.triton_packed import dequantize, packed_gated_linear, packed_linear
from tok_kernels.linear.triton_scaled import scaled_gated_linear, scaled_linear, scaled_project_and_write_kv
from tok_kernels.moe import triton_invariant as invariant_moe
from tok_kernels.moe.triton import fused_experts, select_experts
from tok_kernels.ngrams.triton import accept_drafts, draft_tokens, learn_tokens, predict_tokens
from tok_kernels.norm_rope_kv.separate import SeparateProjection
from tok_kernels.norm_rope_kv.triton_activation import silu_and_mul
from tok_kernels.norm_rope_kv.triton_norm import rms_norm
from tok_kernels.norm_rope_kv.triton_rope import rope_and_write_kv
from tok_kernels.sampling.triton.sampling import sample
from tok_kernels.slots.triton import decode_rows, record_sampled_tokens, set_draft_slots


class TritonBackend:
    """A `tok_kernels.Backend` of Triton kernels, none of which is planned on the host."""

    name: str = "triton"
    needs_host_lengths: frozenset[Phase] = frozenset()
    capturable: bool = True

    max_pack_rows = staticmethod(max_pack_rows)
    rms_norm = staticmethod(rms_norm)
    linear = staticmethod(linear)
    gated_linear = staticmethod(gated_linear)
    scaled_linear = staticmethod(scaled_linear)
    scaled_gated_linear = staticmethod(scaled_gated_linear)
    packed_linear = staticmethod(packed_linear)
    packed_gated_linear = staticmethod(packed_gated_linear)
    dequantize = staticmethod(dequantize)
    select_experts = staticmethod(select_experts)
    fused_experts = staticmethod(fused_experts)
    rope_and_write_kv = staticmethod(rope_and_write_kv)
    project_and_write_kv = staticmethod(project_and_write_kv)
    scaled_project_and_write_kv = staticmethod(scaled_project_and_write_kv)
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


class InvariantTritonBackend(SeparateProjection, TritonBackend):
    """The Triton backend with batch-invariant GEMMs, experts and attention, for dense weights only.

    The bits of a row depend on no other row of the step. The constructor changes torch's GEMMs in this process
    (`forbid_split_k`).
    """

    name = "triton, batch-invariant"

    linear = staticmethod(invariant_linear.linear)
    gated_linear = staticmethod(invariant_linear.gated_linear)
    select_experts = staticmethod(invariant_moe.select_experts)
    fused_experts = staticmethod(invariant_moe.fused_experts)
    attention = staticmethod(invariant_attention.attention)

    @staticmethod
    def max_pack_rows(group: int) -> int:
        return 1  # attention reads the keys of each row by themselves

    def __init__(self) -> None:
        invariant_linear.forbid_split_k()
