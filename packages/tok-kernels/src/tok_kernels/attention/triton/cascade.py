"""Decode rows: shared pages are read once for each group, then each row's own keys, joined by log-sum-exp.

Where there is work enough for the whole GPU the parts are chained: every kernel joins what the one before it left
in part 0 with its own keys, and the last writes the result, so that no pass of its own joins them. Where ranges of
keys are split among programs, each writes a part or a chunk, and one pass joins all (Juravsky et al. 2024,
"Hydragen"; Ye et al. 2024, "Cascade inference").
"""

from __future__ import annotations

from torch import Tensor

from tok_kernels.attention.triton.decode import decode, decode_by_chunks, decode_chunks
from tok_kernels.attention.triton.operands import Operands
from tok_kernels.attention.triton.split_kv import SplitKVPlan, no_split_kv
from tok_kernels.attention.triton.split_kv_partials import empty_partials, merge_partials, new_partials
from tok_kernels.attention.triton.varlen_attention import VarlenItems, attend_tiles, splits_pay, tile_splits
from tok_kernels.batch import AttentionBatch, CascadeLevel


def attend_decode(operands: Operands, batch: AttentionBatch, out_THD: Tensor) -> None:
    """Writes the outputs of the first `num_decode` rows.

    Rows without a key, such as those that fill a captured step up, get zeros and cost an empty program or two; so do
    groups without a row. A row in a group that has itself ended (`kv_len` not above `kv_start`) sees the shared
    keys alone.
    """
    levels = [_items(level, batch) for level in batch.levels if level.row_start.shape[0] and level.max_rows]
    chunks = decode_chunks(operands, batch)
    if chunks is None and any(splits_pay(operands, items) for items in levels):
        chunks = no_split_kv(batch.num_decode)
    if chunks is None:
        _chain(operands, batch, levels, out_THD)
    else:
        _join(operands, batch, levels, chunks, out_THD)


def _items(level: CascadeLevel, batch: AttentionBatch) -> VarlenItems:
    """Decode row b is query token b, and is in at most one group."""
    rows = batch.num_decode
    return VarlenItems(
        *(level.row_start, level.row_count, level.slot, level.kv_start, level.kv_end),
        offset=0,
        number=level.row_start.shape[0],
        most_tokens=rows,
        most_tokens_each=min(level.max_rows, rows),
        most_keys=level.max_kv,
        length=batch.kv_len,
    )


def _chain(operands: Operands, batch: AttentionBatch, levels: list[VarlenItems], out_THD: Tensor) -> None:
    rows = operands.q[: batch.num_decode]
    # One level writes all rows that it covers; of several, the first may leave a row to those after it.
    parts = new_partials(rows, 1, filled=len(levels) > 1) if levels else empty_partials(rows.device)
    for i, items in enumerate(levels):
        attend_tiles(operands, items, out_THD, parts, base=0, splits=1, prior=i > 0, part=0)
    decode(operands, batch, out_THD, parts, prior=bool(levels))


def _join(
    operands: Operands, batch: AttentionBatch, levels: list[VarlenItems], chunks: SplitKVPlan, out_THD: Tensor
) -> None:
    rows = operands.q[: batch.num_decode]
    level_splits = [tile_splits(operands, items) for items in levels]
    # A row in no group of a level is written by none of its programs.
    parts = new_partials(rows, sum(level_splits), chunks=chunks.number, filled=True)
    decode_by_chunks(operands, batch, chunks, parts)
    part = 0
    for items, splits in zip(levels, level_splits, strict=True):
        attend_tiles(operands, items, out_THD, parts, base=0, splits=splits, prior=False, part=part)
        part += splits
    merge_partials(parts, out_THD[: batch.num_decode], operands.padded_head)
