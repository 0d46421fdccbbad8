"""Make decode rows from slots and store sampled tokens in slots: one launch each, one thread per row."""
# mypy: disable-error-code="import-untyped, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tok_kernels.launch_config import pdl_options
from tok_kernels.slots.columns import DecodeRows, SlotColumns

_LANES = 128


def decode_rows(slot_B: Tensor, slots: SlotColumns) -> DecodeRows:
    """Compute `Backend.decode_rows`."""
    rows = slot_B.shape[0]
    token, position, kv_index = torch.empty((3, rows), dtype=torch.int64, device=slot_B.device)
    kv_len = torch.empty(rows, dtype=torch.int32, device=slot_B.device)
    if rows:
        _decode_rows_kernel[(triton.cdiv(rows, _LANES),)](
            *(slot_B, token, position, kv_index, kv_len, rows),
            *(slots.last_token, slots.length, slots.ended, slots.page_table, slots.page_table.stride(0)),
            *(slots.token_of, slots.scratch),
            PAGE=slots.page_size,
            LANES=_LANES,
            num_warps=_LANES // 32,
        )
    return DecodeRows(token, position, kv_index, kv_len)


def record_sampled_tokens(slot_R: Tensor, token_R: Tensor, logprob_R: Tensor, slots: SlotColumns) -> Tensor:
    """Compute `Backend.record_sampled_tokens`."""
    rows = slot_R.shape[0]
    out = torch.empty((2, rows), dtype=torch.int32, device=slot_R.device)
    if rows:
        _record_sampled_tokens_kernel[(triton.cdiv(rows, _LANES),)](
            *(slot_R, token_R, logprob_R, out, rows),
            *(
                slots.last_token,
                slots.length,
                slots.ended,
                slots.eos_from_position,
                slots.end_ids,
                slots.end_ids.shape[0],
            ),
            LANES=_LANES,
            num_warps=_LANES // 32,
            **pdl_options(slot_R.device),
        )
    return out


@triton.jit(
    do_not_specialize=["rows", "table_row", "scratch"],
    do_not_specialize_on_alignment=["slot_ptr", "token_ptr", "position_ptr", "index_ptr", "len_ptr"],
)
def _decode_rows_kernel(
    slot_ptr: tl.tensor,
    token_ptr: tl.tensor,
    position_ptr: tl.tensor,
    index_ptr: tl.tensor,
    len_ptr: tl.tensor,
    rows: tl.tensor,
    last_token_ptr: tl.tensor,
    length_ptr: tl.tensor,
    ended_ptr: tl.tensor,
    table_ptr: tl.tensor,
    table_row: tl.tensor,
    token_of_ptr: tl.tensor,
    scratch: tl.tensor,
    PAGE: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """Make LANES decode rows, one per thread."""
    row = tl.program_id(0) * LANES + tl.arange(0, LANES)
    present = row < rows
    slot = tl.load(slot_ptr + row, mask=present, other=0).to(tl.int64)
    live = present & (tl.load(ended_ptr + slot, mask=present, other=1) == 0)
    position = tl.load(length_ptr + slot, mask=live, other=0)
    token = tl.load(last_token_ptr + slot, mask=live, other=0)
    page = tl.load(table_ptr + slot * table_row + position // PAGE, mask=live, other=0).to(tl.int64)
    index = tl.where(live, page * PAGE + position % PAGE, scratch)
    tl.store(token_of_ptr + index, token, mask=live)
    tl.store(length_ptr + slot, position + 1, mask=live)
    tl.store(token_ptr + row, token, mask=present)
    tl.store(position_ptr + row, position, mask=present)
    tl.store(index_ptr + row, index, mask=present)
    tl.store(len_ptr + row, tl.where(live, position + 1, 0).to(tl.int32), mask=present)


@triton.jit(
    do_not_specialize=["rows", "ends"],
    do_not_specialize_on_alignment=["slot_ptr", "token_ptr", "logprob_ptr", "out_ptr", "end_ids_ptr"],
)
def _record_sampled_tokens_kernel(
    slot_ptr: tl.tensor,
    token_ptr: tl.tensor,
    logprob_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    last_token_ptr: tl.tensor,
    length_ptr: tl.tensor,
    ended_ptr: tl.tensor,
    ends_from_ptr: tl.tensor,
    end_ids_ptr: tl.tensor,
    ends: tl.tensor,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Store the tokens of LANES rows, one per thread."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0) * LANES + tl.arange(0, LANES)
    present = row < rows
    slot = tl.load(slot_ptr + row, mask=present, other=0).to(tl.int64)
    token = tl.load(token_ptr + row, mask=present, other=0)
    tl.store(last_token_ptr + slot, token, mask=present)
    late = tl.load(length_ptr + slot, mask=present, other=0) >= tl.load(ends_from_ptr + slot, mask=present, other=0)
    ended = row < 0
    for i in range(ends):
        ended = ended | (token == tl.load(end_ids_ptr + i))
    tl.store(ended_ptr + slot, tl.full([LANES], 1, tl.int32), mask=present & late & ended)
    tl.store(out_ptr + row, token.to(tl.int32), mask=present)
    logprob = tl.load(logprob_ptr + row, mask=present, other=0.0)
    tl.store(out_ptr + rows + row, logprob.to(tl.int32, bitcast=True), mask=present)
