"""Make decode rows from slots and store sampled tokens in slots: one kernel each, with one thread per row."""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tok_kernels.launch_config import pdl_options
from tok_kernels.slots.columns import DecodeRows, SlotColumns

_BLOCK = 128  # rows of a program


def decode_rows(slot_B: Tensor, slots: SlotColumns) -> DecodeRows:
    """Compute `Backend.decode_rows`."""
    row_count = slot_B.shape[0]
    token, position, kv_index = torch.empty((3, row_count), dtype=torch.int64, device=slot_B.device)
    kv_len = torch.empty(row_count, dtype=torch.int32, device=slot_B.device)
    if row_count:
        _decode_rows_kernel[(triton.cdiv(row_count, _BLOCK),)](
            *(slot_B, token, position, kv_index, kv_len, row_count),
            *(slots.last_token, slots.length, slots.ended, slots.page_table, slots.page_table.stride(0)),
            *(slots.token_of, slots.scratch),
            PAGE=slots.page_size,
            BLOCK=_BLOCK,
            num_warps=_BLOCK // 32,
        )
    return DecodeRows(token, position, kv_index, kv_len)


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


@triton.jit(
    do_not_specialize=["row_count", "page_table_stride", "scratch_row"],
    do_not_specialize_on_alignment=["slot_ptr", "token_ptr", "position_ptr", "kv_index_ptr", "kv_len_ptr"],
)
def _decode_rows_kernel(
    slot_ptr: tl.tensor,
    token_ptr: tl.tensor,
    position_ptr: tl.tensor,
    kv_index_ptr: tl.tensor,
    kv_len_ptr: tl.tensor,
    row_count: tl.tensor,
    last_token_ptr: tl.tensor,
    length_ptr: tl.tensor,
    ended_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    page_table_stride: tl.tensor,
    token_of_ptr: tl.tensor,
    scratch_row: tl.tensor,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Make BLOCK decode rows, one per thread. Grid: `(⌈row_count / BLOCK⌉,)`.

    slot_ptr                       int32 [row_count], slot of each row
    token_ptr to kv_len_ptr        [row_count], results: the columns of `DecodeRows`
    last_token_ptr to scratch_row  fields of `SlotColumns`
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
    tl.store(token_ptr + rows, token, mask=in_range)
    tl.store(position_ptr + rows, position, mask=in_range)
    tl.store(kv_index_ptr + rows, kv_index, mask=in_range)
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
