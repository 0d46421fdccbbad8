"""Compute attention of one step: decode rows with their cascade levels by one set of kernels, prefill by another."""

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
    """Compute `Backend.attention`; the result is contiguous.

    Scores, softmax and sums are float32; softmax weights are rounded to bfloat16 or float16 if q has that dtype. Grids
    depend on host numbers only, so a captured step can be replayed with other lengths below the same bounds. q may be
    strided except along its last axis; page sizes are powers of two, and head_dim is at most 256. Raises ValueError for
    inputs that the kernels do not compute.
    """
    operands = _operands(q_THD, cache, batch, scale, window)
    out = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    # Rows that no program writes are padding; they come after the decode rows.
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
        num_items=batch.slots.shape[0] - base,
        max_tokens=q.shape[0] - base,
        max_item_tokens=batch.max_q,
        max_keys=operands.max_visible_keys(batch.max_kv, batch.max_q),
        length=batch.kv_len,
    )
    splits = tile_splits(operands, items)
    if splits == 1:
        parts = empty_partials(q.device)
        run_varlen_attention(operands, items, out_THD, parts, base_token=base, splits=1, prior=False, first_partial=-1)
        return
    parts = new_partials(q[base:], splits, filled=True)
    run_varlen_attention(operands, items, out_THD, parts, base_token=base, splits=splits, prior=False, first_partial=0)
    merge_partials(operands, parts, out_THD[base:])


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
