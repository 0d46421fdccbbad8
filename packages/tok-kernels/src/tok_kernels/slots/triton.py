"""Make decode rows from slots, store sampled tokens in slots, and fill slots for drafts: one kernel each."""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tok_kernels.launch_config import pdl_options
from tok_kernels.slots.columns import DecodeRows, DraftRows, SlotColumns

_BLOCK = 128  # rows of a program
_PAGE_BLOCK = 256  # page ids that a program copies at once


def decode_rows(slot_B: Tensor, slots: SlotColumns) -> DecodeRows:
    """Compute `Backend.decode_rows`."""
    row_count = slot_B.shape[0]
    rows = torch.empty((6, row_count), dtype=torch.int64, device=slot_B.device)
    kv_len = torch.empty(row_count, dtype=torch.int32, device=slot_B.device)
    temperature = torch.empty(row_count, dtype=torch.float32, device=slot_B.device)
    if row_count:
        _decode_rows_kernel[(triton.cdiv(row_count, _BLOCK),)](
            *(slot_B, rows, rows.stride(0), kv_len, temperature, row_count),
            *(slots.last_token, slots.length, slots.ended, slots.page_table, slots.page_table.stride(0)),
            *(slots.token_of, slots.scratch, slots.seed, slots.sample, slots.temperature),
            PAGE=slots.page_size,
            BLOCK=_BLOCK,
            num_warps=_BLOCK // 32,
        )
    token, position, kv_index, next_position, seed, sample = rows
    return DecodeRows(token, position, kv_index, kv_len, next_position, seed, sample, temperature)


def record_sampled_tokens(slot_R: Tensor, token_R: Tensor, logprob_R: Tensor, slots: SlotColumns) -> Tensor:
    """Compute `Backend.record_sampled_tokens`."""
    row_count = slot_R.shape[0]
    out = torch.empty((2, row_count), dtype=torch.int32, device=slot_R.device)
    if row_count:
        _record_sampled_tokens_kernel[(triton.cdiv(row_count, _BLOCK),)](
            *(slot_R, token_R, logprob_R, out, row_count),
            *(slots.last_token, slots.length, slots.ended, slots.eos_from_position),
            *(slots.end_ids, slots.end_ids.shape[0]),
            BLOCK=_BLOCK,
            num_warps=_BLOCK // 32,
            **pdl_options(slot_R.device),
        )
    return out


def set_draft_slots(drafts: DraftRows, draft_kn: Tensor, columns: Sequence[Tensor], slots: SlotColumns) -> None:
    """Compute `Backend.set_draft_slots`."""
    if not draft_kn.numel():
        return
    int64, int32, float32 = columns
    _set_draft_slots_kernel[draft_kn.shape](
        *(drafts.slot, draft_kn),
        *(int64, int64.stride(0), int32, int32.stride(0), float32, float32.stride(0)),
        *(slots.page_table, slots.page_table.stride(0), slots.page_table.shape[1]),
        INT64_COUNT=int64.shape[0],
        INT32_COUNT=int32.shape[0],
        FLOAT32_COUNT=float32.shape[0],
        LENGTH=_row_of(slots.length, int64),
        LAST_TOKEN=_row_of(slots.last_token, int64),
        ENDED=_row_of(slots.ended, int32),
        COLUMN_BLOCK=triton.next_power_of_2(max(one.shape[0] for one in columns)),
        PAGE=slots.page_size,
        PAGE_BLOCK=_PAGE_BLOCK,
        num_warps=1,
    )


def _row_of(column: Tensor, columns: Tensor) -> int:
    """Return which row of `columns` a column is."""
    return (column.storage_offset() - columns.storage_offset()) // columns.stride(0)


@triton.jit(
    do_not_specialize=["column_stride", "row_count", "page_table_stride", "scratch_row"],
    do_not_specialize_on_alignment=["slot_ptr"],
)
def _decode_rows_kernel(
    slot_ptr: tl.tensor,
    columns_ptr: tl.tensor,
    column_stride: tl.tensor,
    kv_len_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    row_count: tl.tensor,
    last_token_ptr: tl.tensor,
    length_ptr: tl.tensor,
    ended_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    page_table_stride: tl.tensor,
    token_of_ptr: tl.tensor,
    scratch_row: tl.tensor,
    slot_seed_ptr: tl.tensor,
    slot_sample_ptr: tl.tensor,
    slot_temperature_ptr: tl.tensor,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Make BLOCK decode rows, one per thread. Grid: `(⌈row_count / BLOCK⌉,)`.

    slot_ptr                                int32 [row_count], slot of each row
    columns_ptr                             int64 [6, row_count], results: `column_stride` lies between token, position,
                                            kv_index, next_position, seed and sample of `DecodeRows`
    kv_len_ptr, temperature_ptr             [row_count], results: the other columns of `DecodeRows`
    last_token_ptr to slot_temperature_ptr  fields of `SlotColumns`
    """
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_range = rows < row_count
    slot = tl.load(slot_ptr + rows, mask=in_range, other=0).to(tl.int64)
    live = in_range & (tl.load(ended_ptr + slot, mask=in_range, other=1) == 0)
    position = tl.load(length_ptr + slot, mask=live, other=0)
    token = tl.load(last_token_ptr + slot, mask=live, other=0)
    page = tl.load(page_table_ptr + slot * page_table_stride + position // PAGE, mask=live, other=0).to(tl.int64)
    kv_index = tl.where(live, page * PAGE + position % PAGE, scratch_row)
    tl.store(token_of_ptr + kv_index, token, mask=live)
    tl.store(length_ptr + slot, position + 1, mask=live)
    seed = tl.load(slot_seed_ptr + slot, mask=in_range)
    sample = tl.load(slot_sample_ptr + slot, mask=in_range)
    temperature = tl.load(slot_temperature_ptr + slot, mask=in_range)
    columns_ptr += rows
    tl.store(columns_ptr, token, mask=in_range)
    tl.store(columns_ptr + column_stride, position, mask=in_range)
    tl.store(columns_ptr + 2 * column_stride, kv_index, mask=in_range)
    tl.store(columns_ptr + 3 * column_stride, position + 1, mask=in_range)
    tl.store(columns_ptr + 4 * column_stride, seed, mask=in_range)
    tl.store(columns_ptr + 5 * column_stride, sample, mask=in_range)
    tl.store(temperature_ptr + rows, temperature, mask=in_range)
    tl.store(kv_len_ptr + rows, tl.where(live, position + 1, 0).to(tl.int32), mask=in_range)


@triton.jit(
    do_not_specialize=["row_count", "end_id_count"],
    do_not_specialize_on_alignment=["slot_ptr", "token_ptr", "logprob_ptr", "out_ptr", "end_ids_ptr"],
)
def _record_sampled_tokens_kernel(
    slot_ptr: tl.tensor,
    token_ptr: tl.tensor,
    logprob_ptr: tl.tensor,
    out_ptr: tl.tensor,
    row_count: tl.tensor,
    last_token_ptr: tl.tensor,
    length_ptr: tl.tensor,
    ended_ptr: tl.tensor,
    eos_from_position_ptr: tl.tensor,
    end_ids_ptr: tl.tensor,
    end_id_count: tl.tensor,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Store the sampled tokens of BLOCK rows, one per thread. Grid: `(⌈row_count / BLOCK⌉,)`.

    slot_ptr, token_ptr, logprob_ptr  int32, int64 and float32 [row_count]
    out_ptr                           int32 [2, row_count], result: tokens, and bits of log-probabilities
    last_token_ptr to end_ids_ptr     fields of `SlotColumns`
    PDL                               this kernel may start before its predecessor ends
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_range = rows < row_count
    slot = tl.load(slot_ptr + rows, mask=in_range, other=0).to(tl.int64)
    token = tl.load(token_ptr + rows, mask=in_range, other=0)
    tl.store(last_token_ptr + slot, token, mask=in_range)
    length = tl.load(length_ptr + slot, mask=in_range, other=0)
    may_end = length >= tl.load(eos_from_position_ptr + slot, mask=in_range, other=0)
    is_end_id = rows < 0  # false
    for i in range(end_id_count):
        is_end_id = is_end_id | (token == tl.load(end_ids_ptr + i))
    tl.store(ended_ptr + slot, tl.full([BLOCK], 1, tl.int32), mask=in_range & may_end & is_end_id)
    tl.store(out_ptr + rows, token.to(tl.int32), mask=in_range)
    logprob = tl.load(logprob_ptr + rows, mask=in_range, other=0.0)
    tl.store(out_ptr + row_count + rows, logprob.to(tl.int32, bitcast=True), mask=in_range)


@triton.jit(
    do_not_specialize=["int64_stride", "int32_stride", "float32_stride", "page_table_stride", "max_pages"],
    do_not_specialize_on_alignment=["slot_ptr", "draft_ptr"],
)
def _set_draft_slots_kernel(
    slot_ptr: tl.tensor,
    draft_ptr: tl.tensor,
    int64_ptr: tl.tensor,
    int64_stride: tl.tensor,
    int32_ptr: tl.tensor,
    int32_stride: tl.tensor,
    float32_ptr: tl.tensor,
    float32_stride: tl.tensor,
    page_table_ptr: tl.tensor,
    page_table_stride: tl.tensor,
    max_pages: tl.tensor,
    INT64_COUNT: tl.constexpr,
    INT32_COUNT: tl.constexpr,
    FLOAT32_COUNT: tl.constexpr,
    LENGTH: tl.constexpr,
    LAST_TOKEN: tl.constexpr,
    ENDED: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    PAGE_BLOCK: tl.constexpr,
) -> None:
    """Fill the slot that feeds one drafted token. Grid: `(k, n)`.

    slot_ptr                     int32 [1 + k, n], `DraftRows.slot`
    draft_ptr                    int64 [k, n], drafted tokens
    int64_ptr to float32_stride  columns of each dtype, [COUNT, S]
    page_table_ptr               int32 [S, max_pages]
    LENGTH, LAST_TOKEN           rows of `SlotColumns.length` and `last_token` among the int64 columns
    ENDED                        row of `SlotColumns.ended` among the int32 columns
    """
    i, sequence, sequences = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    slot = tl.load(slot_ptr + (1 + i) * sequences + sequence).to(tl.int64)
    if slot < 0:
        return
    source = tl.load(slot_ptr + sequence).to(tl.int64)
    token = tl.load(draft_ptr + i * sequences + sequence)
    position = tl.load(int64_ptr + LENGTH * int64_stride + source) + 1 + i
    column = tl.arange(0, COLUMN_BLOCK)
    int64 = tl.load(int64_ptr + column * int64_stride + source, mask=column < INT64_COUNT, other=0)
    int64 = tl.where(column == LENGTH, position, int64)
    int64 = tl.where(column == LAST_TOKEN, tl.maximum(token, 0), int64)
    tl.store(int64_ptr + column * int64_stride + slot, int64, mask=column < INT64_COUNT)
    int32 = tl.load(int32_ptr + column * int32_stride + source, mask=column < INT32_COUNT, other=0)
    int32 = tl.where(column == ENDED, int32 + (token < 0).to(tl.int32), int32)
    tl.store(int32_ptr + column * int32_stride + slot, int32, mask=column < INT32_COUNT)
    float32 = tl.load(float32_ptr + column * float32_stride + source, mask=column < FLOAT32_COUNT)
    tl.store(float32_ptr + column * float32_stride + slot, float32, mask=column < FLOAT32_COUNT)
    pages = tl.minimum(position // PAGE + 1, max_pages)
    for start in range(0, pages, PAGE_BLOCK):
        page = start + tl.arange(0, PAGE_BLOCK)
        page_id = tl.load(page_table_ptr + source * page_table_stride + page, mask=page < pages)
        tl.store(page_table_ptr + slot * page_table_stride + page, page_id, mask=page < pages)
