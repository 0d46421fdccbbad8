"""One query token a sequence: a program for each sequence, key/value head and split of the sequence's own keys."""
# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from tok_kernels.batch import AttentionBatch
from tok_kernels.triton import config
from tok_kernels.triton.online import attend, finish, join, resume, unseen
from tok_kernels.triton.operands import Operands
from tok_kernels.triton.parts import Parts


@triton.jit(
    # Values that change from step to step must not compile the kernel anew.
    do_not_specialize=["table_row", "rows", "splits", "part"],
    do_not_specialize_on_alignment=["slots_ptr", "start_ptr", "len_ptr", "table_ptr"],
)
def _decode(
    q_ptr,
    out_ptr,
    part_out_ptr,
    part_lse_ptr,
    slots_ptr,
    start_ptr,
    len_ptr,
    rows,
    splits,
    part,
    q_token,
    q_head,
    k_ptr,
    v_ptr,
    table_ptr,
    kv_page,
    kv_row,
    kv_head_stride,
    table_row,
    scale,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    HEAD: tl.constexpr,
    PADDED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    PRIOR: tl.constexpr,
    EARLY: tl.constexpr,
):
    """PRIOR: join with part 0. EARLY: the kernel that writes it lets this one start before it ends. `part`: the
    part written by split 0, or −1: the result is final."""
    program = tl.program_id(0)
    kv_head = program % KV_HEADS
    split = program // KV_HEADS % splits
    row = (program // KV_HEADS // splits).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    start = tl.load(start_ptr + row)
    end = tl.load(len_ptr + row)
    share = tl.cdiv(tl.cdiv(end - start, KEYS), splits) * KEYS
    begin = start + split * share
    end = tl.minimum(end, begin + share)

    g = tl.arange(0, GROUP_PADDED)
    d = tl.arange(0, PADDED)
    head = kv_head * GROUP + g
    present = g < GROUP
    d_present = d < HEAD
    both = present[:, None] & d_present[None, :]
    q = tl.load(q_ptr + row * q_token + head[:, None] * q_head + d[None, :], mask=both, other=0.0)
    line = row * (KV_HEADS * GROUP) + head
    out_offset = line[:, None] * HEAD + d[None, :]
    top, total, acc = unseen(GROUP_PADDED, PADDED)
    limit = tl.full([GROUP_PADDED], 0, tl.int32) + end
    top, total, acc = attend(
        *(q, top, total, acc, limit, begin, end),
        *(k_ptr + kv_head * kv_head_stride, v_ptr + kv_head * kv_head_stride, table_ptr + slot * table_row),
        *(kv_page, kv_row, scale),
        *(PAGE, KEYS, HEAD, PADDED, True),
    )
    if PRIOR:
        # The row's own keys do not wait for the prefix, which the kernel before may still be at.
        if EARLY:
            gdc_wait()
        # A row that starts at 0 is in no group, and nothing was written for it.
        prefix_top, prefix_total, prefix_acc = resume(
            part_lse_ptr + line, part_out_ptr + out_offset, present & (start > 0), d_present
        )
        top, total, acc = join(top, total, acc, prefix_top, prefix_total, prefix_acc)
    out, lse = finish(top, total, acc)
    if part < 0:
        tl.store(out_ptr + out_offset, out.to(out_ptr.dtype.element_ty), mask=both)
    else:
        skipped = (part + split).to(tl.int64) * rows * (KV_HEADS * GROUP)
        tl.store(part_lse_ptr + skipped + line, lse, mask=present)
        tl.store(part_out_ptr + skipped * HEAD + out_offset, out, mask=both)


def decode_splits(operands: Operands, batch: AttentionBatch) -> int:
    """Programs that share one sequence's keys, from host bounds."""
    programs, device = batch.num_decode * operands.kv_heads, operands.q.device
    return config.splits(programs, _launch(operands), batch.max_kv, config.DECODE_SPLIT_KEYS, device)


def decode(
    operands: Operands, batch: AttentionBatch, out_THD: Tensor, parts: Parts, splits: int, prior: bool, part: int
) -> None:
    """Attends from the first `num_decode` rows to their own keys; `prior` and `part` as in the kernel.

    With `prior` nothing may be launched between the tiles that write part 0 and this.
    """
    early = prior and config.starts_early(operands.q.device)
    launch = _launch(operands)
    _decode[(batch.num_decode * splits * operands.kv_heads,)](
        *(operands.q, out_THD, parts.out, parts.lse, batch.slots, batch.kv_start, batch.kv_len),
        *(batch.num_decode, splits, part),
        *operands.runtime(),
        KEYS=launch.keys,
        GROUP_PADDED=launch.rows,
        **operands.static(),
        num_warps=launch.warps,
        num_stages=launch.stages,
        maxnreg=launch.registers,
        PRIOR=prior,
        EARLY=early,
        **({"launch_pdl": True} if early else {}),
    )


def _launch(operands: Operands) -> config.Launch:
    return config.decode_launch(operands.padded_head, operands.group, operands.q.dtype)
