"""Compute attention of one step: decode rows with their cascade levels, then prefill chunks, each with own kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from tok_kernels.attention.triton.cascade import attend_decode
from tok_kernels.attention.triton.operands import Operands
from tok_kernels.attention.triton.split_kv_partials import empty_partials, merge_partials, new_partials
from tok_kernels.attention.triton.varlen_attention import VarlenItems, run_varlen_attention, tile_splits
from tok_kernels.batch import AttentionBatch, LayerCache


def attention(
    q_THD: Tensor, cache: LayerCache, batch: AttentionBatch, scale: float, window: int | None = None
) -> Tensor:
    """Return the paged, causal, grouped-query attention of one step with cascade levels.

    The result is `[T, H, D]` of q's dtype, contiguous. With a `window`, a query sees at most that many positions, the
    last of which is its own.

    Scores, softmax and sums are float32; for bfloat16 and float16 the softmax weights are rounded to that type. Grids
    depend on host numbers only. A step can thus be captured in a CUDA graph and replayed with other lengths below the
    same bounds. Cache rows that no query may see can hold NaN. A token without keys, and a token of no sequence, gets
    zeros. q may be strided except along its last axis; page sizes are powers of two, and head_dim is at most 256.
    Raises ValueError for inputs that the kernels do not compute.
    """
    operands = _operands(q_THD, cache, batch, scale, window)
    out = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    # Only rows after the decode rows can be padding that no program writes.
    out[batch.num_decode :].zero_()
    if batch.num_decode:
        attend_decode(operands, batch, out)
    if q_THD.shape[0] > batch.num_decode and batch.slots.shape[0] > batch.num_decode:
        prefill(operands, batch, out)
    return out


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


def triton_decode_kernel(
    q_THD: Tensor, cache: LayerCache, batch: AttentionBatch, scale: float, out_THD: Tensor
) -> None:
    """Compute the phases "decode" and "cascade" with Triton."""
    attend_decode(_operands(q_THD, cache, batch, scale), batch, out_THD)


def triton_prefill_kernel(
    q_THD: Tensor, cache: LayerCache, batch: AttentionBatch, scale: float, out_THD: Tensor
) -> None:
    """Compute the phase "prefill" with Triton."""
    prefill(_operands(q_THD, cache, batch, scale), batch, out_THD)


def _operands(
    q_THD: Tensor, cache: LayerCache, batch: AttentionBatch, scale: float, window: int | None = None
) -> Operands:
    operands = Operands(q_THD, cache, batch.page_table, scale, window)
    operands.check()
    return operands
