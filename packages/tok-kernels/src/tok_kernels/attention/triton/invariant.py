"""Compute batch-invariant attention on a GPU: a query's bits depend on its own sequence alone, in all phases.

Online softmax reads a query's keys in blocks of BLOCK_KEYS positions, and blocks belong to splits of SPLIT_KEYS. Both
lie at fixed absolute positions, and splits are merged in order. So the bits do not depend on how work is divided:

  prefill chunk, long row  one program computes all splits of a tile (`invariant_attention_kernel`)
  decode row               one program computes each split (`invariant_decode_kernel`); another one merges them
                           (`merge_splits_kernel`)
  prefix group             a program stores the exact states of the group's rows (`invariant_attention_kernel`), and
                           programs of the rows continue from these states

Group boundaries are rounded down to blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tok_kernels import launch_config as config
from tok_kernels.attention.interface import AttentionShape
from tok_kernels.attention.triton.invariant_decode import invariant_decode_kernel, merge_splits_kernel
from tok_kernels.attention.triton.invariant_kernels import invariant_attention_kernel
from tok_kernels.attention.triton.operands import Operands
from tok_kernels.attention.triton.varlen_attention import tile_counts
from tok_kernels.batch import AttentionBatch, CascadeLevel, LayerCache

SPLIT_KEYS = 512  # positions
BLOCK_KEYS = 32  # positions; more would not fit the registers of a decode row with large heads
_MIN_HEAD_DIM, _MAX_HEAD_DIM = 33, 128  # the bits of other head sizes were not compared
_MAX_GROUP = 16  # query heads per key/value head; more do not fit a decode row's tile
_ITEMS = 256  # items that a program counts at a time while it searches for its tile
_TILE_ROWS = 64  # query rows of a tile of a prefill chunk or a prefix group
_DECODE_REGISTERS = 112, 200  # maximum per thread, for padded heads up to 64 and above; more lower the occupancy
_STAGES = 2  # Triton's num_stages, of the decode kernel
# Up to this many rows × key/value heads, more blocks are loaded ahead: on an H200, a row of 768 keys takes 13.9 µs
# instead of 21.6 with heads of 64 elements, and 27.4 instead of 31.6 with 128; 32 rows 20.0 instead of 29.6, and 37.4
# instead of 39.7.
_FEW_ROW_STAGES, _MAX_FEW_PROGRAMS = 5, 1 << 8
# Up to this many, for padded heads up to 64 and above, four warps instead of one share a row's blocks: a row takes 12.6
# µs instead of 15.2, and 15.9 instead of 27.6; 32 rows of heads of 64 would take 21.9 instead of 20.7.
_FEW_ROW_WARPS, _MAX_SHARED_PROGRAMS = 4, (1 << 7, 1 << 8)
_MAX_PROGRAMS = 1 << 15  # programs of a decode step; beyond, empty programs cost more than splits save
_MAX_PDL_PROGRAMS = 1 << 9  # rows × key/value heads up to which decode kernels start before their predecessors end
_MAX_STATE_BYTES = 1 << 28  # bytes of the states of a decode step's splits


@dataclass(frozen=True, slots=True)
class _States:
    """N online-softmax states for each of R rows: float32 `acc` `[N, R, H, D]`, `row_max` and `row_sum` `[N, R, H]`.

    The states of decode rows are those of their N splits. Prefix groups have N = 2 states per row: the merged state of
    all complete splits, and the state of the incomplete last split.
    """

    acc: Tensor
    row_max: Tensor
    row_sum: Tensor

    @staticmethod
    def empty(number: int, q_RHD: Tensor) -> _States:
        rows, heads, size = q_RHD.shape
        acc = torch.empty((number, rows, heads, size), dtype=torch.float32, device=q_RHD.device)
        row_max, row_sum = torch.empty((2, number, rows, heads), dtype=torch.float32, device=q_RHD.device)
        return _States(acc, row_max, row_sum)


def not_invariant_reason(shape: AttentionShape) -> str | None:
    """Return why attention of this shape is not known to be batch-invariant on a GPU; None if it is."""
    if shape.dtype.itemsize != 2:
        return f"dtype is {shape.dtype}; batch_invariant allows bfloat16 and float16 on a GPU"
    if shape.cache_dtype != shape.dtype:
        return f"cache_dtype is {shape.cache_dtype}; batch_invariant allows {shape.dtype} on a GPU"
    if not _MIN_HEAD_DIM <= shape.head_dim <= _MAX_HEAD_DIM:
        return f"head_dim is {shape.head_dim}; batch_invariant allows {_MIN_HEAD_DIM} to {_MAX_HEAD_DIM} on a GPU"
    if shape.heads > _MAX_GROUP * shape.kv_heads:
        return f"{shape.heads} heads share {shape.kv_heads}; batch_invariant allows {_MAX_GROUP} for one on a GPU"
    return None


def attention(
    q_THD: Tensor, cache: LayerCache, batch: AttentionBatch, scale: float, window: int | None = None
) -> Tensor:
    """Compute `Backend.attention`. Grids depend on host numbers only, so that graphs can capture decode steps."""
    operands = Operands(q_THD, cache, batch.page_table, scale, window)
    operands.check()
    if operands.token_scales() != (None, None):
        raise ValueError("the cache has per-token scales; batch-invariant kernels allow none")
    out = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    out[batch.num_decode :].zero_()
    if batch.num_decode:
        _attend_decode(operands, batch, out)
    chunks = batch.slots.shape[0] - batch.num_decode
    if q_THD.shape[0] > batch.num_decode and chunks:
        tiles = tile_counts(_TILE_ROWS, operands.group, chunks, q_THD.shape[0] - batch.num_decode, batch.max_q)
        _launch_tiles(operands, batch, out, _States.empty(0, q_THD[:0]), tiles, offset=batch.num_decode, items=chunks)
    return out


def _attend_decode(operands: Operands, batch: AttentionBatch, out: Tensor) -> None:
    """Write the outputs of the decode rows: prefix groups first, then splits, then rows of too many splits."""
    rows, q = batch.num_decode, operands.q[: batch.num_decode]
    levels = [level for level in batch.levels if level.row_start.shape[0] and level.max_rows]
    if 2 * rows * operands.kv_heads <= 8 * config.multiprocessors(q.device):
        levels = []  # few rows leave SMs idle, so each row reads the shared prefix itself
    prior = _States.empty(2 if levels else 0, q)
    if len(levels) > 1:
        prior.row_max.fill_(-torch.inf)  # the first level may not cover a row of a later one
    for i, level in enumerate(levels):
        groups, members = level.row_start.shape[0], min(level.max_rows, rows)
        tiles = tile_counts(_TILE_ROWS, operands.group, groups, rows, members)
        _launch_tiles(operands, batch, q, prior, tiles, offset=0, items=groups, prior=i > 0, level=level)
    max_splits = -(-batch.max_kv // SPLIT_KEYS)
    split_bytes = 4 * max(1, q.numel())
    programs_per_row = max(2, _MAX_PROGRAMS // (rows * operands.kv_heads))
    splits = max(1, min(max_splits, programs_per_row, _MAX_STATE_BYTES // split_bytes))
    _launch_decode(operands, batch, out, prior, splits, prior=bool(levels))
    if max_splits > splits:
        one_tile_per_row = (rows, 1)
        _launch_tiles(
            *(operands, batch, out, prior, one_tile_per_row),
            offset=0,
            items=rows,
            prior=bool(levels),
            min_splits=splits + 1,
        )


def _launch_decode(
    operands: Operands, batch: AttentionBatch, out: Tensor, prior_states: _States, splits: int, *, prior: bool
) -> None:
    """Compute decode rows of at most `splits` splits: one program per split, then one per row to merge them."""
    rows, q = batch.num_decode, operands.q[: batch.num_decode]
    states = _States.empty(splits if splits > 1 else 0, q)
    pointers = states.acc, states.row_max, states.row_sum, prior_states.acc, prior_states.row_max, prior_states.row_sum
    programs = rows * operands.kv_heads
    few, wide = programs <= _MAX_FEW_PROGRAMS, operands.padded_head > 64
    pdl_options = config.pdl_options(q.device) if programs <= _MAX_PDL_PROGRAMS else {"PDL": False}
    shared = {
        "ROWS": _decode_rows(operands),
        "KEYS": BLOCK_KEYS,
        "SPLIT": SPLIT_KEYS,
        "PRIOR": prior,
    }
    invariant_decode_kernel[(programs, splits)](
        *(operands.q, out, *pointers, batch.slots, batch.kv_start, batch.kv_len, rows),
        *operands.runtime(),
        **operands.static(),
        **shared,
        num_warps=_FEW_ROW_WARPS if programs <= _MAX_SHARED_PROGRAMS[wide] else 1,
        num_stages=_FEW_ROW_STAGES if few else _STAGES,
        maxnreg=_DECODE_REGISTERS[wide],
        **pdl_options,
    )
    if splits > 1:
        static = operands.static()
        merge_splits_kernel[(programs,)](
            *(out, *pointers, batch.kv_start, batch.kv_len, rows, splits, operands.cache.v_scale),
            **{name: static[name] for name in ("KV_HEADS", "GROUP", "HEAD", "PADDED", "WINDOW")},
            **shared,
            num_warps=1,
            **pdl_options,
        )


def _launch_tiles(
    operands: Operands,
    batch: AttentionBatch,
    out: Tensor,
    states: _States,
    tiles: tuple[int, int],
    *,
    offset: int,
    items: int,
    prior: bool = False,
    level: CascadeLevel | None = None,
    min_splits: int = 0,
) -> None:
    """Launch `invariant_attention_kernel` over the sequences, or over the groups of a cascade level.

    tiles       number of tiles, and of tiles per item (0: programs search for their tile)
    prior       continue from `states`
    level       groups whose rows' states are stored in `states`; None: store the outputs of sequences
    min_splits  skip decode rows with fewer splits; 0: the sequences are prefill chunks
    """
    first, count, slot, start, end = batch.q_start, batch.q_start, batch.slots, batch.kv_start, batch.kv_len
    if level is not None:
        first, count, slot, start, end = (
            *(level.row_start, level.row_count, level.slot),
            *(level.kv_start, level.kv_end),
        )
    invariant_attention_kernel[(tiles[0] * operands.kv_heads,)](
        *(operands.q, out, states.acc, states.row_max, states.row_sum, first, count, slot, start, end, batch.kv_len),
        *(offset, items, tiles[1], states.row_max.shape[1], min_splits),
        *operands.runtime(),
        ROWS=_decode_rows(operands) if min_splits else _TILE_ROWS,
        KEYS=BLOCK_KEYS,
        SPLIT=SPLIT_KEYS,
        ITEMS=_ITEMS,
        CAUSAL=level is None,
        PRIOR=prior,
        UNMASKED=not min_splits,
        **operands.static(),
        num_warps=1 if min_splits else 4,
        num_stages=2,
    )


def _decode_rows(operands: Operands) -> int:
    """Return the query heads of a key/value head, padded to the rows of a decode row's tile."""
    return max(16, config.power_of_two(operands.group))
