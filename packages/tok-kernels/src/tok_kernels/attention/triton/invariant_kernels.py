"""Define the kernel of batch-invariant attention for tiles of query rows, and functions over online-softmax states.

`tok_kernels.attention.triton.invariant` describes the algorithm and launches the kernel. The state (row_max, row_sum,
acc) of a row is that of `tok_kernels.attention.triton.online_softmax`.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from tok_kernels.attention.triton.online_softmax import cast_queries, empty_state
from tok_kernels.attention.triton.varlen_tiles import find_tile, token_count, visible_keys


@triton.jit
def attend_blocks(
    q: tl.tensor,
    row_max: tl.tensor,
    row_sum: tl.tensor,
    acc: tl.tensor,
    window_start: tl.tensor,
    limit: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    first_key: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    pages_ptr: tl.tensor,
    kv_page_stride: tl.tensor,
    kv_row_stride: tl.tensor,
    scale: tl.tensor,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    HEAD: tl.constexpr,
    PADDED: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Return the state of every row after the positions [begin, end); `begin` is a multiple of KEYS.

    With MASKED, a row sees the positions below its `limit`. With WINDOWED as well, it sees only those from its
    `window_start` on, and positions below `first_key` are not read. Without MASKED, every row sees all positions, and
    `end` is a multiple of KEYS, too.
    """
    d = tl.arange(0, PADDED)
    for block in range(begin, end, KEYS):
        position = block + tl.arange(0, KEYS)
        inside = position >= 0
        if MASKED:
            inside = position < end
            if WINDOWED:
                inside &= position >= first_key
            page = tl.load(pages_ptr + position // PAGE, mask=inside, other=0).to(tl.int64)
        else:
            page = tl.load(pages_ptr + position // PAGE).to(tl.int64)
        kv_offset = (page * kv_page_stride + position % PAGE * kv_row_stride)[:, None] + d[None, :]
        if MASKED or HEAD != PADDED:
            present = inside[:, None] & (d < HEAD)[None, :]
            k = tl.load(k_ptr + kv_offset, mask=present, other=0.0)
            v = tl.load(v_ptr + kv_offset, mask=present, other=0.0)
        else:
            k = tl.load(k_ptr + kv_offset)
            v = tl.load(v_ptr + kv_offset)
        score = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        if MASKED:
            seen = (position[None, :] < limit[:, None]) & inside[None, :]
            if WINDOWED:
                seen &= position[None, :] >= window_start[:, None]
            score = tl.where(seen, score, float("-inf"))
        block_max = tl.max(score, 1)
        peak = tl.maximum(row_max, block_max * scale)
        shift = tl.where(peak == float("-inf"), 0.0, peak)
        # Explicit FMAs: whether the compiler fuses a product and a sum depends on the kernel.
        weight = tl.exp2(tl.fma(score, scale, -shift[:, None]))
        rescale = tl.exp2(row_max - shift)
        gap = tl.fma(block_max, -scale, shift)
        row_sum = tl.fma(row_sum, rescale, _sum_weights(weight, gap, KEYS))
        acc = tl.dot(weight.to(q.dtype), v.to(q.dtype), acc * rescale[:, None], input_precision="ieee")
        row_max = peak
    return row_max, row_sum, acc


@triton.jit
def _sum_weights(weight: tl.tensor, gap: tl.tensor, KEYS: tl.constexpr) -> tl.tensor:
    """Sum the weights of each row of a block; the bits do not depend on how warps divide the block.

    `gap` is the base-2 logarithm of the reciprocal of a row's largest weight. Weights are divided by the largest one,
    rounded to multiples of 2⁻²³, which the bits of 1 + weight count, and added as integers modulo 2³².
    """
    gap = tl.minimum(gap, 126.0)
    one_bits: tl.constexpr = 0x3F800000
    sums = tl.sum(tl.fma(weight, tl.exp2(gap)[:, None], 1.0).to(tl.int32, bitcast=True), 1)
    count = (sums.to(tl.int64) - KEYS * one_bits) & 0xFFFFFFFF
    return count.to(tl.float32) * (tl.exp2(-gap) * 2.0**-23)


@triton.jit
def merge_split_states(
    row_max: tl.tensor,
    row_sum: tl.tensor,
    acc: tl.tensor,
    next_max: tl.tensor,
    next_sum: tl.tensor,
    next_acc: tl.tensor,
) -> tuple[tl.tensor, ...]:
    """Merge the state of all earlier splits with the state of the next split."""
    peak = tl.maximum(row_max, next_max)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    rescale = tl.exp2(row_max - shift)
    next_rescale = tl.exp2(next_max - shift)
    row_sum = tl.fma(row_sum, rescale, next_sum * next_rescale)
    acc = tl.fma(acc, rescale[:, None], next_acc * next_rescale[:, None])
    return peak, row_sum, acc


@triton.jit
def load_state(
    acc_ptr: tl.tensor,
    row_max_ptr: tl.tensor,
    row_sum_ptr: tl.tensor,
    head_row: tl.tensor,
    present: tl.tensor,
    d: tl.tensor,
    HEAD: tl.constexpr,
    EAGER: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Load the states at `head_row`; the empty state without `present`.

    `store_state` writes only the `row_max` of an empty state, −inf. With EAGER, sums are loaded without waiting for
    `row_max`, and replaced afterwards if the state is empty.
    """
    row_max = tl.load(row_max_ptr + head_row, mask=present, other=float("-inf"))
    written = row_max != float("-inf")  # NaN counts as written
    loaded = present if EAGER else written
    row_sum = tl.load(row_sum_ptr + head_row, mask=loaded, other=0.0)
    acc = tl.load(
        acc_ptr + head_row[:, None] * HEAD + d[None, :], mask=loaded[:, None] & (d < HEAD)[None, :], other=0.0
    )
    return row_max, tl.where(written, row_sum, 0.0), tl.where(written[:, None], acc, 0.0)


@triton.jit
def store_state(
    acc_ptr: tl.tensor,
    row_max_ptr: tl.tensor,
    row_sum_ptr: tl.tensor,
    head_row: tl.tensor,
    present: tl.tensor,
    d: tl.tensor,
    row_max: tl.tensor,
    row_sum: tl.tensor,
    acc: tl.tensor,
    HEAD: tl.constexpr,
) -> None:
    """Store states at `head_row`; of an empty state, only `row_max`."""
    tl.store(row_max_ptr + head_row, row_max, mask=present)
    present &= row_max != float("-inf")
    tl.store(row_sum_ptr + head_row, row_sum, mask=present)
    tl.store(acc_ptr + head_row[:, None] * HEAD + d[None, :], acc, mask=present[:, None] & (d < HEAD)[None, :])


@triton.jit
def write_result(
    out_ptr: tl.tensor,
    head_row: tl.tensor,
    present: tl.tensor,
    d: tl.tensor,
    row_sum: tl.tensor,
    acc: tl.tensor,
    v_scale_ptr: tl.tensor | None,
    kv_head: tl.tensor,
    HEAD: tl.constexpr,
) -> None:
    """Write the attention outputs of states; zeros for states without keys."""
    out = acc / tl.where(row_sum != 0, row_sum, 1.0)[:, None]
    if v_scale_ptr is not None:
        out *= tl.load(v_scale_ptr + kv_head)
    mask = present[:, None] & (d < HEAD)[None, :]
    tl.store(out_ptr + head_row[:, None] * HEAD + d[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(
    # A value that changes from step to step must not recompile the kernel.
    do_not_specialize=["page_table_stride", "offset", "items", "tiles_per_item", "rows", "min_splits"],
    do_not_specialize_on_alignment=[
        *("first_ptr", "count_ptr", "slots_ptr", "start_ptr", "end_ptr", "length_ptr", "page_table_ptr")
    ],
)
def invariant_attention_kernel(
    q_ptr: tl.tensor,
    out_ptr: tl.tensor,
    acc_ptr: tl.tensor,
    row_max_ptr: tl.tensor,
    row_sum_ptr: tl.tensor,
    first_ptr: tl.tensor,
    count_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    start_ptr: tl.tensor,
    end_ptr: tl.tensor,
    length_ptr: tl.tensor,
    offset: tl.tensor,
    items: tl.tensor,
    tiles_per_item: tl.tensor,
    rows: tl.tensor,
    min_splits: tl.tensor,
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
    PAGE: tl.constexpr,
    HEAD: tl.constexpr,
    PADDED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    FP16: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    ITEMS: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRIOR: tl.constexpr,
    UNMASKED: tl.constexpr,
) -> None:
    """Attend from one tile of query rows to all keys of its item, split by split in order of position.

    Grid: `(tiles × KV_HEADS,)`, with the key/value head changing fastest. Rows, tiles and items are those of
    `tok_kernels.attention.triton.varlen_attention`.

    1. Find the program's tile and the range of keys that its rows see; the range begins at a block boundary.
    2. Load the queries. With PRIOR, continue from the states of the rows' prefix groups.
    3. For each split, run online softmax over its blocks, then merge the split's state with that of earlier splits.
    4. CAUSAL: store the outputs. Otherwise store two states per row: that of all complete splits (state 0), and that of
       the incomplete last split (state 1), which the row's own keys continue.

    q_ptr, out_ptr           [T, H, HEAD]; out_ptr is contiguous
    acc_ptr                  float32 [2, rows, H, HEAD], weighted sums of values
    row_max_ptr, row_sum_ptr float32 [2, rows, H], largest scores and sums of weights
    first_ptr to length_ptr  int32, the fields of `VarlenItems`
    tiles_per_item           tiles of every item; 0: each program searches for its tile
    rows                     rows of a state
    min_splits               skip a CAUSAL item that has fewer splits
    CAUSAL                   items are sequences, not prefix groups; without PRIOR, their keys begin at position 0
    ROWS, KEYS, SPLIT        query rows of a tile; keys of a block and of a split
    ITEMS                    items that the search for a tile counts at a time
    UNMASKED                 compute blocks without a mask where every row sees all keys

    `Operands` describes the other arguments.
    """
    # Find the tile.
    kv_head, item, first_row, _, _ = find_tile(
        first_ptr, count_ptr, offset, items, tiles_per_item, 1, 1, KV_HEADS, GROUP, ROWS, ITEMS, CAUSAL
    )
    if item >= items:
        return
    item += offset
    first_token = tl.load(first_ptr + item)
    tokens = token_count(first_ptr, count_ptr, item, True, CAUSAL)
    if first_row >= tokens * GROUP:
        return
    slot = tl.load(slots_ptr + item).to(tl.int64)
    end = tl.load(end_ptr + item)
    start = tl.load(start_ptr + item)
    has_prior = start > 0  # an item that starts at position 0 is in no group
    start = start // KEYS * KEYS
    if CAUSAL:
        if not PRIOR:
            start = start * 0
    else:
        end = end // KEYS * KEYS
    row = first_row + tl.arange(0, ROWS)
    query = row // GROUP
    head = kv_head * GROUP + row % GROUP
    present = query < tokens
    token = (first_token + query).to(tl.int64)

    # Compute the keys that the rows see.
    limit, window_start, start, end, causal_begin, _ = visible_keys(
        start, end, tokens, first_row, query, token, present, length_ptr, GROUP, ROWS, WINDOW, CAUSAL
    )
    seen_from = tl.zeros([ROWS], tl.int32)
    if WINDOW:
        seen_from = window_start
    start = tl.maximum(start, 0)
    if CAUSAL and tl.cdiv(end, SPLIT) - start // SPLIT < min_splits:
        return

    # Load the queries and the prior states.
    d = tl.arange(0, PADDED)
    mask = present[:, None] & (d < HEAD)[None, :]
    q = tl.load(q_ptr + (token * q_token_stride + head * q_head_stride)[:, None] + d[None, :], mask=mask, other=0.0)
    q = cast_queries(q, FP16)
    head_row = token * (KV_HEADS * GROUP) + head
    state_stride = rows.to(tl.int64) * (KV_HEADS * GROUP)
    merged_max, merged_sum, merged_acc = empty_state(ROWS, PADDED)
    row_max, row_sum, acc = empty_state(ROWS, PADDED)
    if PRIOR:
        merged_max, merged_sum, merged_acc = load_state(
            acc_ptr, row_max_ptr, row_sum_ptr, head_row, present & has_prior, d, HEAD, False
        )
        row_max, row_sum, acc = load_state(
            acc_ptr, row_max_ptr, row_sum_ptr, state_stride + head_row, present & has_prior, d, HEAD, True
        )

    # Read the keys and values of each split, and merge its state.
    k_ptr += kv_head * kv_head_stride
    v_ptr += kv_head * kv_head_stride
    page_table_ptr += slot * page_table_stride
    for split_begin in range(start // SPLIT * SPLIT, end, SPLIT):
        split_end = tl.minimum(split_begin + SPLIT, end)
        begin = tl.maximum(start // KEYS * KEYS, split_begin)
        masked_begin = begin
        if UNMASKED and WINDOW == 0:
            masked_begin = tl.minimum(tl.maximum(causal_begin // KEYS * KEYS, begin), split_end)
            row_max, row_sum, acc = attend_blocks(
                *(q, row_max, row_sum, acc, seen_from, limit, begin, masked_begin, start),
                *(k_ptr, v_ptr, page_table_ptr, kv_page_stride, kv_row_stride, scale),
                *(PAGE, KEYS, HEAD, PADDED, False, False),
            )
        row_max, row_sum, acc = attend_blocks(
            *(q, row_max, row_sum, acc, seen_from, limit, masked_begin, split_end, start),
            *(k_ptr, v_ptr, page_table_ptr, kv_page_stride, kv_row_stride, scale),
            *(PAGE, KEYS, HEAD, PADDED, True, WINDOW > 0),
        )
        if CAUSAL or split_end == split_begin + SPLIT:
            merged_max, merged_sum, merged_acc = merge_split_states(
                merged_max, merged_sum, merged_acc, row_max, row_sum, acc
            )
            row_max, row_sum, acc = empty_state(ROWS, PADDED)

    # Store the outputs or the states.
    if CAUSAL:
        # Without own keys the loop does not run, and the incomplete split of the row's group is still to be merged.
        _, row_sum, acc = merge_split_states(merged_max, merged_sum, merged_acc, row_max, row_sum, acc)
        write_result(out_ptr, head_row, present, d, row_sum, acc, v_scale_ptr, kv_head, HEAD)
    else:
        store_state(acc_ptr, row_max_ptr, row_sum_ptr, head_row, present, d, merged_max, merged_sum, merged_acc, HEAD)
        store_state(acc_ptr, row_max_ptr, row_sum_ptr, state_stride + head_row, present, d, row_max, row_sum, acc, HEAD)
