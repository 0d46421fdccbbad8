"""Attend from one query token per sequence: one program for each key/value head and row, or chunk of a row's keys.

Rows that verify drafted tokens of one sequence share a program if the batch has packs: tensor cores compute 16 rows at
once, and the query heads of a key/value head are fewer.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tok_kernels import launch_config as config
from tok_kernels.attention.triton.online_softmax import (
    attend,
    cast_queries,
    empty_state,
    finish,
    load_partial,
    merge_states,
)
from tok_kernels.attention.triton.operands import Operands
from tok_kernels.attention.triton.split_kv import (
    MAX_COUNTED_ROWS_AND_HEADS,
    SplitKVPlan,
    count_blocks,
    count_chunks,
    find_chunk,
    find_keys,
    plan_split_kv,
)
from tok_kernels.attention.triton.split_kv_partials import SplitKVPartials, merge_row
from tok_kernels.batch import AttentionBatch
from tok_kernels.zeroed_counters import ZeroedCounters

_TILE_ROWS = 16  # rows of queries that tensor cores compute at once
_MAX_PACK_ROWS = 8
_MERGED_ELEMENTS = 2048  # elements of partial results that a warp reads at a time

_counters = ZeroedCounters(MAX_COUNTED_ROWS_AND_HEADS)


def max_pack_rows(group: int) -> int:
    """Compute `Backend.max_pack_rows`: the queries of a pack fill the tile of a program."""
    return max(1, min(_MAX_PACK_ROWS, _TILE_ROWS // group))


@triton.jit(
    # A value that changes from step to step must not recompile the kernel.
    do_not_specialize=[
        "page_table_stride",
        "rows",
        "splits",
        "split_rows",
        "target_chunks",
        "min_keys",
        "max_chunks",
    ],
    do_not_specialize_on_alignment=["counters_ptr", "slots_ptr", "start_ptr", "len_ptr", "packs_ptr", "page_table_ptr"],
)
def _decode_attention_kernel(
    q_ptr: tl.tensor,
    out_ptr: tl.tensor,
    part_out_ptr: tl.tensor,
    part_lse_ptr: tl.tensor,
    counters_ptr: tl.tensor,
    chunks_ptr: tl.tensor | None,
    slots_ptr: tl.tensor,
    start_ptr: tl.tensor,
    len_ptr: tl.tensor,
    packs_ptr: tl.tensor,
    rows: tl.tensor,
    splits: tl.tensor,
    split_rows: tl.tensor,
    target_chunks: tl.tensor,
    min_keys: tl.tensor,
    max_chunks: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    kv_page_stride: tl.tensor,
    kv_row_stride: tl.tensor,
    kv_head_stride: tl.tensor,
    page_table_stride: tl.tensor,
    scale: tl.tensor,
    v_scale_ptr: tl.tensor | None,
    k_token_scale_ptr: tl.tensor | None,
    v_token_scale_ptr: tl.tensor | None,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    HEAD: tl.constexpr,
    PADDED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    FP16: tl.constexpr,
    WINDOW: tl.constexpr,
    PACK: tl.constexpr,
    PADDED_ROWS: tl.constexpr,
    MERGED_HEADS: tl.constexpr,
    MERGED_PARTS: tl.constexpr,
    CHUNKED: tl.constexpr,
    MERGED: tl.constexpr,
    PRIOR: tl.constexpr,
    BESIDE_TILES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Attend from one decode row to its own keys, or to one chunk of them, for the query heads of one key/value head.

    With a PACK of more than one row, packs take the place of rows, and a program attends from all rows of its pack.
    Grid: `(rows × KV_HEADS,)`, or with CHUNKED `(chunks × KV_HEADS,)`; the key/value head changes fastest.

    1. Find the row and its range of keys. CHUNKED: find the program's chunk; programs past the last chunk return.
    2. Load the queries, and run online softmax over the keys.
    3. PRIOR: merge the state with partial result 0 of the row, that of its prefix groups.
    4. Store the output. CHUNKED: if the row has other partial results, those of its prefix groups or of other chunks,
       store the chunk's own. MERGED: the last program of a row to arrive merges all of them in a fixed order and stores
       the output.

    q_ptr, out_ptr                       [R, H, HEAD]; out_ptr is contiguous
    part_out_ptr, part_lse_ptr           float32 [entries, H, HEAD] and [entries, H], as in `SplitKVPartials`
    counters_ptr                         MERGED: int32 [rows, KV_HEADS], number of chunks of a row that have arrived; 0
                                         before and after the kernel
    chunks_ptr                           int32 [R, 2], `SplitKVPartials.chunks`, written; None if MERGED
    slots_ptr, start_ptr, len_ptr        int32 [R], `AttentionBatch`'s slots, kv_start and kv_len
    packs_ptr                            int32 [rows, PACK], `AttentionBatch.packs`; not read if PACK is 1
    rows                                 R, or the number of packs
    splits, split_rows                   `SplitKVPartials.splits` and `rows`: partial results of prefix groups
    target_chunks, min_keys, max_chunks  as in `SplitKVPlan`
    KEYS                                 keys of a block
    PACK                                 rows of a pack; 1: there are no packs
    PADDED_ROWS                          PACK × GROUP, padded to the rows of a block
    MERGED_HEADS                         GROUP, padded to a power of two
    MERGED_PARTS                         partial results that are read at a time when they are merged
    BESIDE_TILES                         the predecessor computes the partial results of prefix groups. It did not start
                                         early, so this kernel waits for it only before it reads these, or ends
    PDL                                  this kernel may start before its predecessor ends

    `Operands` describes the other arguments.
    """
    # Find the row and its keys. The search for the chunk need not wait, since lengths and slots are complete before the
    # step's first kernel that may start early.
    if PDL and CHUNKED:
        gdc_launch_dependents()
    program = tl.program_id(0)
    kv_head = program % KV_HEADS
    row = program // KV_HEADS
    if CHUNKED:
        chunk = row
        row, first_chunk, blocks_per_chunk = find_chunk(
            start_ptr, len_ptr, packs_ptr, rows, chunk, target_chunks, min_keys, max_chunks, KEYS, WINDOW, PACK
        )
        if row >= rows:
            if PDL:
                gdc_wait()
            return
    row = row.to(tl.int64)
    begin, end = find_keys(start_ptr, len_ptr, packs_ptr, row, True, WINDOW, PACK)

    # Find the row of each query: they are query heads of the row, or of each row of the pack.
    query = tl.arange(0, PADDED_ROWS)
    head = kv_head * GROUP + query % GROUP
    if PACK == 1:
        member = 0
        present = query < GROUP
        query_row = tl.full([PADDED_ROWS], 0, tl.int64) + row
        start = tl.load(start_ptr + row)
        limit = tl.full([PADDED_ROWS], 0, tl.int32) + end
        window_start = limit
        slot = tl.load(slots_ptr + row).to(tl.int64)
    else:
        member = query // GROUP
        query_row = tl.load(packs_ptr + row * PACK + member, mask=member < PACK, other=-1).to(tl.int64)
        present = query_row >= 0
        start = tl.load(start_ptr + query_row, mask=present, other=0)
        limit = tl.load(len_ptr + query_row, mask=present, other=0)
        window_start = start
        if WINDOW:
            window_start = tl.maximum(start, limit - WINDOW)
        longest = present & (limit == end)
        slot = tl.max(tl.load(slots_ptr + query_row, mask=longest, other=0), 0).to(tl.int64)
    if CHUNKED:
        row_blocks = count_blocks(begin, end, KEYS)
        chunk_count = count_chunks(row_blocks, blocks_per_chunk, max_chunks)
        keys_per_chunk = tl.cdiv(row_blocks, chunk_count) * KEYS
        begin += (chunk - first_chunk) * keys_per_chunk
        end = tl.minimum(end, begin + keys_per_chunk)
        if PDL and not BESIDE_TILES:
            gdc_wait()

    # Load the queries, and read the keys and values.
    d = tl.arange(0, PADDED)
    d_mask = d < HEAD
    mask = present[:, None] & d_mask[None, :]
    q_offset = query_row * q_token_stride + head * q_head_stride
    q = tl.load(q_ptr + q_offset[:, None] + d[None, :], mask=mask, other=0.0)
    q = cast_queries(q, FP16)
    head_row = query_row * (KV_HEADS * GROUP) + head
    out_offset = head_row[:, None] * HEAD + d[None, :]
    state = empty_state(PADDED_ROWS, PADDED)
    if k_token_scale_ptr is not None:
        k_token_scale_ptr += kv_head * PAGE
        v_token_scale_ptr += kv_head * PAGE
    state = attend(
        *(q, state, window_start, limit, begin, end),
        *(k_ptr + kv_head * kv_head_stride, v_ptr + kv_head * kv_head_stride),
        page_table_ptr + slot * page_table_stride,
        *(kv_page_stride, kv_row_stride, scale, k_token_scale_ptr, v_token_scale_ptr),
        *(PAGE, KEYS, HEAD, PADDED, KV_HEADS, True, PACK > 1),
    )

    # Merge with the prefix, and store the output or the partial result.
    if PRIOR:
        # The predecessor may compute the prefix until here, since the row's own keys do not depend on it.
        if PDL and not CHUNKED:
            gdc_wait()
        # A row that starts at position 0 is in no group and has no partial result.
        prefix_state = load_partial(part_lse_ptr + head_row, part_out_ptr + out_offset, present & (start > 0), d_mask)
        state = merge_states(state, prefix_state)
    out, lse = finish(state)
    is_single = not CHUNKED
    if CHUNKED:
        entry = (splits * split_rows + chunk * PACK + member).to(tl.int64)
        part_row = entry * (KV_HEADS * GROUP) + head
        if MERGED:
            is_single = (chunk_count == 1) & (splits == 0)
        if not is_single:
            tl.store(part_lse_ptr + part_row, lse, mask=present)
            tl.store(part_out_ptr + part_row[:, None] * HEAD + d[None, :], out, mask=mask)
    if MERGED:
        is_last = chunk_count == 1
        if chunk_count > 1:
            tl.debug_barrier()  # all threads of the program have stored their partial results
            counter_ptr = counters_ptr + row * KV_HEADS + kv_head
            is_last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == chunk_count - 1
            if is_last:
                tl.store(counter_ptr, 0)
        if PDL and BESIDE_TILES:
            gdc_wait()
        if is_last & (not is_single):
            tl.debug_barrier()
            merge_row(
                *(out_ptr, part_out_ptr, part_lse_ptr, row, kv_head, start > 0, first_chunk, chunk_count),
                *(splits, split_rows, v_scale_ptr),
                *(HEAD, PADDED, KV_HEADS, GROUP, MERGED_HEADS, MERGED_PARTS),
            )
    elif CHUNKED:
        if chunk == first_chunk:
            if kv_head == 0:
                tl.store(chunks_ptr + 2 * query_row, first_chunk * PACK + member, mask=present)
                tl.store(chunks_ptr + 2 * query_row + 1, chunk_count, mask=present)
            # A row that starts at position 0 is in no group, and no tile writes its splits.
            ungrouped = present & (start + tl.zeros_like(query) == 0)
            for split in range(splits):
                part_row = (split * split_rows + query_row) * (KV_HEADS * GROUP) + head
                tl.store(part_lse_ptr + part_row, float("-inf"), mask=ungrouped)
        if PDL and BESIDE_TILES:
            gdc_wait()
    if is_single:
        if v_scale_ptr is not None:
            out *= tl.load(v_scale_ptr + kv_head)
        tl.store(out_ptr + out_offset, out.to(out_ptr.dtype.element_ty), mask=mask)


def decode_chunks(operands: Operands, batch: AttentionBatch) -> SplitKVPlan | None:
    """Return the plan that splits the rows' own keys, made from host bounds; None: no split."""
    whole, split = (_programs(operands, _launch(operands, split=split)) for split in (False, True))
    if batch.packs is not None:
        whole *= 2  # the host does not know how many packs are empty; the others have two rows or more
    return plan_split_kv(batch.num_decode, operands.kv_heads, whole, split, operands.max_visible_keys(batch.max_kv))


def decode(operands: Operands, batch: AttentionBatch, out_THD: Tensor, parts: SplitKVPartials, *, prior: bool) -> None:
    """Attend from the first `num_decode` rows to their own keys and write the outputs.

    With `prior`, each row's result is merged with partial result 0. Nothing may then be launched between the tiles that
    write partial result 0 and this kernel, which reads the cache while the tiles still run. The tiles themselves do not
    start early, so all kernels that wrote the cache have ended before.
    """
    pdl_options = config.pdl_options(operands.q.device) if prior else {"PDL": False}
    rows = batch.num_decode if batch.packs is None else len(batch.packs)
    programs = rows * operands.kv_heads
    launch = _launch(operands, split=False)
    options = {"CHUNKED": False, "MERGED": False, "PRIOR": prior, "BESIDE_TILES": False} | pdl_options
    _run(operands, batch, out_THD, parts, launch, programs, (1, 1, 1), **options)


def decode_by_chunks(
    operands: Operands, batch: AttentionBatch, chunks: SplitKVPlan, out_THD: Tensor, parts: SplitKVPartials
) -> None:
    """Attend from the first `num_decode` rows to their own keys, by chunks.

    Without a table of chunks in `parts`, this kernel also merges all partial results into the outputs. If there are
    splits, the kernel launched before must be the tiles that write the last of them. This kernel then reads and writes
    while the tiles still run: they did not start early, so all kernels before them have ended.
    """
    options = {"CHUNKED": True, "MERGED": parts.chunks is None, "PRIOR": False, "BESIDE_TILES": parts.splits > 0}
    options |= config.pdl_options(operands.q.device)
    programs = chunks.num_chunks * operands.kv_heads
    launch = _launch(operands, split=chunks.max_chunks > 1)
    numbers = (chunks.target_chunks, chunks.min_keys, chunks.max_chunks)
    _run(operands, batch, out_THD, parts, launch, programs, numbers, **options)


def _run(
    operands: Operands,
    batch: AttentionBatch,
    out: Tensor,
    parts: SplitKVPartials,
    launch: config.AttentionLaunch,
    programs: int,
    chunk_arguments: tuple[int, int, int],
    **options: bool,
) -> None:
    packs, (rows, pack) = batch.slots, (batch.num_decode, 1)
    if batch.packs is not None:
        packs, (rows, pack) = batch.packs, batch.packs.shape
    merged_heads = config.power_of_two(operands.group)
    merged_parts = max(1, _MERGED_ELEMENTS * launch.warps // (merged_heads * operands.padded_head))
    counters = _counters.of(operands.q.device) if options["MERGED"] else batch.slots
    _decode_attention_kernel[(programs,)](
        *(operands.q, out, parts.out, parts.lse, counters, parts.chunks),
        *(batch.slots, batch.kv_start, batch.kv_len, packs),
        *(rows, parts.splits, parts.rows, *chunk_arguments),
        *operands.runtime(),
        *operands.token_scales(),
        KEYS=launch.keys,
        PACK=pack,
        PADDED_ROWS=max(launch.rows, config.power_of_two(pack * operands.group)),
        MERGED_HEADS=merged_heads,
        MERGED_PARTS=merged_parts,
        **operands.static(),
        num_warps=launch.warps,
        num_stages=launch.stages,
        maxnreg=launch.registers,
        **options,
    )


def _programs(operands: Operands, launch: config.AttentionLaunch) -> int:
    """Return the number of programs for each key/value head that keeps the GPU busy."""
    return max(1, launch.programs * config.multiprocessors(operands.q.device) // operands.kv_heads)


def _launch(operands: Operands, *, split: bool) -> config.AttentionLaunch:
    dtypes = (operands.q.dtype, operands.cache.k.dtype)
    return config.decode_launch(operands.padded_head, operands.group, *dtypes, split=split)
