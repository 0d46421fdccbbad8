"""Compute decode rows: read shared pages once per group, then each row's own keys, and merge by log-sum-exp.

If there is enough work for the whole GPU, the kernels are chained. Each kernel merges its own keys with partial result
0, which the kernel before it wrote, and the last one writes the output. If ranges of keys are split among programs,
each program writes a partial result. The last program of a row to arrive merges all of them, or one more kernel does
(Juravsky et al. 2024, "Hydragen"; Ye et al. 2024, "Cascade inference").
"""

from __future__ import annotations

from torch import Tensor

from tok_kernels.attention.triton.decode import decode, decode_by_chunks, decode_chunks
from tok_kernels.attention.triton.operands import Operands
from tok_kernels.attention.triton.split_kv import SplitKVPlan, no_split_kv
from tok_kernels.attention.triton.split_kv_partials import empty_partials, merge_partials, new_partials
from tok_kernels.attention.triton.varlen_attention import VarlenItems, run_varlen_attention, splits_pay, tile_splits
from tok_kernels.batch import AttentionBatch, CascadeLevel

# The last program of a row to arrive merges up to about 16 partial results. For more, a kernel with a program for each
# query head is faster, unless there are many rows. With heads of up to 64 elements, it already is for 16: a layer of
# Llama-3.2-1B takes 38.6 µs instead of 40.3 for a row of 640 keys, and 50.4 instead of 50.7 for 8 rows (H200).
_MAX_MERGED_PARTS, _MAX_SEPARATELY_MERGED_ROWS = 16, 32


def attend_decode(operands: Operands, batch: AttentionBatch, out_THD: Tensor) -> None:
    """Write the outputs of the first `num_decode` rows.

    A row without keys, such as the padding of a captured step, gets zeros. Such a row and an empty group cost one or
    two empty programs each. A row whose own range is empty (`kv_len` not above `kv_start`) sees only the shared keys of
    its groups.
    """
    levels = [_items(level, batch) for level in batch.levels if level.row_start.shape[0] and level.max_rows]
    chunks = decode_chunks(operands, batch)
    if chunks is None and any(splits_pay(operands, items) for items in levels):
        chunks = no_split_kv(batch.num_decode)
    if chunks is None:
        _run_chained(operands, batch, levels, out_THD)
    else:
        _run_split(operands, batch, levels, chunks, out_THD)


def _items(level: CascadeLevel, batch: AttentionBatch) -> VarlenItems:
    """Return a level's groups as `VarlenItems`: decode row b is query token b, and is in at most one group."""
    rows = batch.num_decode
    return VarlenItems(
        *(level.row_start, level.row_count, level.slot, level.kv_start, level.kv_end),
        offset=0,
        num_items=level.row_start.shape[0],
        max_tokens=rows,
        max_item_tokens=min(level.max_rows, rows),
        max_keys=level.max_kv,
        length=batch.kv_len,
    )


def _run_chained(operands: Operands, batch: AttentionBatch, levels: list[VarlenItems], out_THD: Tensor) -> None:
    """Compute the levels one after the other, then the rows' own keys, each merged with the result before it."""
    rows = operands.q[: batch.num_decode]
    # A single level writes all rows that it covers. With several levels, the first may not cover a row of a later one.
    parts = new_partials(rows, 1, filled=len(levels) > 1) if levels else empty_partials(rows.device)
    for i, items in enumerate(levels):
        run_varlen_attention(operands, items, out_THD, parts, base_token=0, splits=1, prior=i > 0, first_partial=0)
    decode(operands, batch, out_THD, parts, prior=bool(levels))


def _run_split(
    operands: Operands, batch: AttentionBatch, levels: list[VarlenItems], chunks: SplitKVPlan, out_THD: Tensor
) -> None:
    """Compute the levels and, beside the last one, own keys by chunks as partial results; merge all of them."""
    rows, level_splits = operands.q[: batch.num_decode], [tile_splits(operands, items) for items in levels]
    splits = sum(level_splits)
    row_parts = splits + min(chunks.max_chunks, -(-chunks.target_chunks // batch.num_decode))  # of similar rows
    max_merged_parts = _MAX_MERGED_PARTS - (operands.padded_head <= 64)
    are_many = row_parts > max_merged_parts and batch.num_decode <= _MAX_SEPARATELY_MERGED_ROWS
    # Merging a pack's rows would take more registers than reading their keys.
    table = are_many or batch.packs is not None
    stride = 1 if batch.packs is None else batch.packs.shape[1]
    # A single level writes all splits of the rows that it covers. With several, a row may be in some of them only.
    parts = new_partials(rows, splits, chunks=chunks.num_chunks, stride=stride, table=table, filled=len(levels) > 1)
    first_partial = 0
    for items, number in zip(levels, level_splits, strict=True):
        run_varlen_attention(
            operands, items, out_THD, parts, base_token=0, splits=number, prior=False, first_partial=first_partial
        )
        first_partial += number
    decode_by_chunks(operands, batch, chunks, out_THD, parts)
    if table:
        merge_partials(operands, parts, out_THD[: batch.num_decode])
