"""Define the kernels of batch-invariant decode: one program per split of a row's own keys, and the merge of splits.

`tok_kernels.attention.triton.invariant` describes the algorithm and launches the kernels.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tok_kernels.attention.triton.invariant_kernels import (
    attend_blocks,
    load_state,
    merge_split_states,
    store_state,
    write_result,
)
from tok_kernels.attention.triton.online_softmax import cast_queries, empty_state


@triton.jit
def _own_keys(
    start_ptr: tl.tensor,
    end_ptr: tl.tensor,
    row: tl.tensor,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    PRIOR: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Return the block-aligned begin and the end of a decode row's own keys, its first split, and number of splits.

    Without PRIOR, the row's own keys begin at position 0. A row has at least one split.
    """
    end = tl.load(end_ptr + row)
    begin = end * 0
    if PRIOR:
        begin = tl.load(start_ptr + row) // KEYS * KEYS
    if WINDOW:
        begin = tl.maximum(begin, tl.maximum(end - WINDOW, 0) // KEYS * KEYS)
    first_split = begin // SPLIT
    return begin, end, first_split, tl.maximum(tl.cdiv(end, SPLIT) - first_split, 1)


@triton.jit(
    do_not_specialize=["page_table_stride", "rows"],
    do_not_specialize_on_alignment=["slots_ptr", "start_ptr", "end_ptr", "page_table_ptr"],
)
def invariant_decode_kernel(
    q_ptr: tl.tensor,
    out_ptr: tl.tensor,
    acc_ptr: tl.tensor,
    row_max_ptr: tl.tensor,
    row_sum_ptr: tl.tensor,
    prior_acc_ptr: tl.tensor,
    prior_max_ptr: tl.tensor,
    prior_sum_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    start_ptr: tl.tensor,
    end_ptr: tl.tensor,
    rows: tl.tensor,
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
    PRIOR: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Attend from one decode row to one split of its own keys, for the query heads of one key/value head.

    Grid: `(R × KV_HEADS, splits)`, with the key/value head changing fastest. Rows with more splits than the grid are
    skipped.

    1. Compute the positions of the program's split; a program without a split returns.
    2. Load the queries. With PRIOR, the first split continues from the incomplete split of the row's prefix group.
    3. Run online softmax over the split's blocks.
    4. If the row has several splits, store the state for `merge_splits_kernel`. Otherwise merge the state with that of
       the group's complete splits, and store the output.

    q_ptr, out_ptr           [R, H, HEAD]; out_ptr is contiguous
    acc_ptr                  float32 [splits, rows, H, HEAD], states of the splits: weighted sums of values
    row_max_ptr, row_sum_ptr float32 [splits, rows, H], largest scores and sums of weights
    prior_acc_ptr to prior_sum_ptr  states 0 and 1 that `invariant_attention_kernel` stored, in the same layout
    slots_ptr, start_ptr, end_ptr   int32 [R], `AttentionBatch`'s slots, kv_start and kv_len
    rows                     R
    ROWS, KEYS, SPLIT        GROUP, padded to the rows of a block; keys of a block and of a split

    `Operands` describes the other arguments.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    kv_head = tl.program_id(0) % KV_HEADS
    row = (tl.program_id(0) // KV_HEADS).to(tl.int64)
    split = tl.program_id(1)

    # Compute the keys of the split.
    begin, end, first_split, splits = _own_keys(start_ptr, end_ptr, row, KEYS, SPLIT, WINDOW, PRIOR)
    if (split >= splits) | (splits > tl.num_programs(1)):
        return
    begin = tl.maximum(begin, (first_split + split) * SPLIT)
    split_end = tl.minimum(end, (first_split + split + 1) * SPLIT)

    # Load the queries and the prior state.
    slot = tl.load(slots_ptr + row).to(tl.int64)
    group_head = tl.arange(0, ROWS)
    d = tl.arange(0, PADDED)
    head = kv_head * GROUP + group_head
    present = group_head < GROUP
    mask = present[:, None] & (d < HEAD)[None, :]
    q = tl.load(q_ptr + row * q_token_stride + head[:, None] * q_head_stride + d[None, :], mask=mask, other=0.0)
    q = cast_queries(q, FP16)
    head_row = row * (KV_HEADS * GROUP) + head
    state_stride = rows.to(tl.int64) * (KV_HEADS * GROUP)
    row_max, row_sum, acc = empty_state(ROWS, PADDED)
    if PRIOR:
        # A row that starts at position 0 is in no group.
        has_prior = present & (tl.load(start_ptr + row) > 0)
        row_max, row_sum, acc = load_state(
            prior_acc_ptr,
            prior_max_ptr,
            prior_sum_ptr,
            state_stride + head_row,
            has_prior & (split == 0),
            d,
            HEAD,
            True,
        )

    # Read the keys and values.
    limit = tl.full([ROWS], 0, tl.int32) + split_end
    row_max, row_sum, acc = attend_blocks(
        *(q, row_max, row_sum, acc, limit - WINDOW, limit, begin, split_end, end - WINDOW),
        *(
            k_ptr + kv_head * kv_head_stride,
            v_ptr + kv_head * kv_head_stride,
            page_table_ptr + slot * page_table_stride,
        ),
        *(kv_page_stride, kv_row_stride, scale, PAGE, KEYS, HEAD, PADDED, True, WINDOW > 0),
    )

    # Store the state or the output.
    if splits > 1:
        store_state(
            acc_ptr, row_max_ptr, row_sum_ptr, split * state_stride + head_row, present, d, row_max, row_sum, acc, HEAD
        )
    else:
        if PRIOR:
            prior_max, prior_sum, prior_acc = load_state(
                prior_acc_ptr, prior_max_ptr, prior_sum_ptr, head_row, has_prior, d, HEAD, False
            )
            row_max, row_sum, acc = merge_split_states(prior_max, prior_sum, prior_acc, row_max, row_sum, acc)
        write_result(out_ptr, head_row, present, d, row_sum, acc, v_scale_ptr, kv_head, HEAD)


@triton.jit(do_not_specialize=["rows", "max_splits"], do_not_specialize_on_alignment=["start_ptr", "end_ptr"])
def merge_splits_kernel(
    out_ptr: tl.tensor,
    acc_ptr: tl.tensor,
    row_max_ptr: tl.tensor,
    row_sum_ptr: tl.tensor,
    prior_acc_ptr: tl.tensor,
    prior_max_ptr: tl.tensor,
    prior_sum_ptr: tl.tensor,
    start_ptr: tl.tensor,
    end_ptr: tl.tensor,
    rows: tl.tensor,
    max_splits: tl.tensor,
    v_scale_ptr: tl.tensor | None,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    PADDED: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    PRIOR: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Merge the states of a decode row's splits in order and store its outputs, for one key/value head.

    Grid: `(R × KV_HEADS,)`, with the key/value head changing fastest. With PRIOR, the merge begins with the complete
    splits of the row's prefix group. Rows of one split, and of more than `max_splits`, are skipped. Pointers are those
    of `invariant_decode_kernel`.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    kv_head = tl.program_id(0) % KV_HEADS
    row = (tl.program_id(0) // KV_HEADS).to(tl.int64)
    _, _, _, splits = _own_keys(start_ptr, end_ptr, row, KEYS, SPLIT, WINDOW, PRIOR)
    if (splits == 1) | (splits > max_splits):
        return
    group_head = tl.arange(0, ROWS)
    d = tl.arange(0, PADDED)
    head_row = row * (KV_HEADS * GROUP) + kv_head * GROUP + group_head
    state_stride = rows.to(tl.int64) * (KV_HEADS * GROUP)
    present = group_head < GROUP
    row_max, row_sum, acc = empty_state(ROWS, PADDED)
    if PRIOR:
        has_prior = present & (tl.load(start_ptr + row) > 0)
        row_max, row_sum, acc = load_state(
            prior_acc_ptr, prior_max_ptr, prior_sum_ptr, head_row, has_prior, d, HEAD, False
        )
    for split in range(splits):
        next_max, next_sum, next_acc = load_state(
            acc_ptr, row_max_ptr, row_sum_ptr, split * state_stride + head_row, present, d, HEAD, True
        )
        row_max, row_sum, acc = merge_split_states(row_max, row_sum, acc, next_max, next_sum, next_acc)
    write_result(out_ptr, head_row, present, d, row_sum, acc, v_scale_ptr, kv_head, HEAD)
