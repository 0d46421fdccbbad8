"""Compute prefill chunks: ragged causal attention over a paged cache, queries at each sequence's last positions."""

from __future__ import annotations

from torch import Tensor

from tok_kernels.attention.triton.operands import Operands
from tok_kernels.attention.triton.split_kv_partials import empty_partials, merge_partials, new_partials
from tok_kernels.attention.triton.varlen_attention import VarlenItems, run_varlen_attention, tile_splits
from tok_kernels.batch import AttentionBatch


def prefill(operands: Operands, batch: AttentionBatch, out_THD: Tensor) -> None:
    """Write the outputs of all sequences after the first `num_decode`; rows of no sequence stay unchanged."""
    base, q = batch.num_decode, operands.q
    items = VarlenItems(
        *(batch.q_start, None, batch.slots, batch.kv_start, batch.kv_len),
        offset=base,
        number=batch.slots.shape[0] - base,
        most_tokens=q.shape[0] - base,
        most_tokens_each=batch.max_q,
        most_keys=operands.most_keys(batch.max_kv, batch.max_q),
        length=batch.kv_len,
    )
    splits = tile_splits(operands, items)
    if splits == 1:
        parts = empty_partials(q.device)
        run_varlen_attention(operands, items, out_THD, parts, base=base, splits=1, prior=False, part=-1)
        return
    parts = new_partials(q[base:], splits, filled=True)
    run_varlen_attention(operands, items, out_THD, parts, base=base, splits=splits, prior=False, part=0)
    merge_partials(parts, out_THD[base:], operands.padded_head)
