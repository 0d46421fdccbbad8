"""One-shot all-reduce in one kernel: each rank sends its values to all ranks and adds all values in rank order."""
# mypy: disable-error-code="import-untyped, untyped-decorator, assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tok_kernels.collectives.exchange import MAX_ALL_REDUCE_BYTES, UNITS_PER_PROGRAM, ExchangeChannel
from tok_kernels.collectives.triton_signals import (
    advance_epoch,
    escape_empty,
    load_unit,
    message_ptr,
    receive_unit,
    store_unit,
)
from tok_kernels.launch_config import pdl_options

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WARPS = 4  # one unit per thread
_UNIT_BYTES = 16


def can_all_reduce(size: int, dtype: torch.dtype) -> bool:
    """Return whether `one_shot_all_reduce` supports tensors of `size` bytes and this dtype."""
    return dtype in _DTYPES and 0 < size <= MAX_ALL_REDUCE_BYTES and size % _UNIT_BYTES == 0


def one_shot_all_reduce(x: Tensor, channel: ExchangeChannel, residual: Tensor | None = None) -> Tensor:
    """Return the sum of all ranks' `x`, plus `residual` if given, in the dtype of x.

    `x` has the same size on all ranks, and `residual` has the same values on all ranks. The result overwrites
    `residual` if given, else `x`. If that tensor is not contiguous or not aligned to 16 bytes, a copy is overwritten
    instead. Sums are float32 and rounded once, to the same bits on every rank.

    Raises ValueError if `can_all_reduce` is false, or if the residual differs from x in shape or dtype.
    """
    if not can_all_reduce(x.nbytes, x.dtype):
        allowed = f"multiples of {_UNIT_BYTES} up to {MAX_ALL_REDUCE_BYTES}"
        raise ValueError(f"x has {x.nbytes} bytes of {x.dtype}; allowed: {allowed}")
    if residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype):
        raise ValueError(f"residual is {residual.dtype} {tuple(residual.shape)}; allowed: as x, {tuple(x.shape)}")
    x = _contiguous_aligned(x)
    out = x if residual is None else _contiguous_aligned(residual)
    units = x.nbytes // _UNIT_BYTES
    _sum_over_ranks_kernel[(triton.cdiv(units, UNITS_PER_PROGRAM),)](
        *(x, out, units, channel.buffers, channel.epochs, channel.timeout_ticks),
        ADD=residual is not None,
        RANK=channel.rank,
        RANKS=channel.ranks,
        PROGRAMS=channel.programs,
        WORDS=channel.words,
        num_warps=_WARPS,
        **pdl_options(x.device),
    )
    return out


def _contiguous_aligned(x: Tensor) -> Tensor:
    """Return x, or a copy of x if it is not contiguous or not aligned to 16 bytes."""
    if x.is_contiguous() and x.data_ptr() % _UNIT_BYTES == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


@triton.jit(do_not_specialize=["units"])
def _sum_over_ranks_kernel(
    x: tl.tensor,
    out: tl.tensor,
    units: tl.tensor,
    buffers: tl.tensor,
    epochs: tl.tensor,
    timeout_ticks: tl.tensor,
    ADD: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    WORDS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """All-reduce WORDS words of `x` into `out`; each thread sums one unit of 16 bytes over all ranks.

    Grid: `(⌈units / (WORDS / 4)⌉,)`.

    1. Load this rank's units, and store them in the buffers of all other ranks.
    2. For each rank in order, receive its units in this rank's buffer, and add them in float32.
    3. ADD: add the residual, which is at `out`.
    4. Store the sum, rounded once, and advance the epoch of this program's messages.

    x, out                    contiguous, aligned to 16 bytes
    units                     units of 16 bytes of x
    buffers to timeout_ticks  fields of the `ExchangeChannel`
    PDL                       this kernel may start before its predecessor ends
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(0)
    unit = tl.arange(0, WORDS // 4)
    mask = program * (WORDS // 4) + unit < units
    offset = (program * (WORDS // 4) + unit) * 4
    epoch = tl.load(epochs + program)
    own = load_unit(x.to(tl.pointer_type(tl.uint32)) + offset, mask)
    own = (escape_empty(own[0]), escape_empty(own[1]), escape_empty(own[2]), escape_empty(own[3]))
    for target_rank in tl.static_range(RANKS):
        if target_rank != RANK:
            message = message_ptr(buffers[target_rank], epoch, RANK, program, RANKS, PROGRAMS, WORDS)
            store_unit(message + unit * 4, own, mask)
    if ADD:
        residual = load_unit(out.to(tl.pointer_type(tl.uint32)) + offset, mask)
    total = unpack_floats(own, x.dtype.element_ty)
    for source_rank in tl.static_range(RANKS):
        if source_rank == RANK:
            words = own
        else:
            message = message_ptr(buffers[RANK], epoch, source_rank, program, RANKS, PROGRAMS, WORDS)
            words = receive_unit(message + unit * 4, mask, timeout_ticks)
        values = unpack_floats(words, x.dtype.element_ty)
        total = values if source_rank == 0 else _add(total, values)
    if ADD:
        total = _add(total, unpack_floats(residual, x.dtype.element_ty))
    store_unit(out.to(tl.pointer_type(tl.uint32)) + offset, pack_floats(total, x.dtype.element_ty), mask)
    advance_epoch(epochs, program, epoch)


@triton.jit
def unpack_floats(words: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Convert a unit of four words to float32: a tuple of four 32-bit or eight 16-bit floats."""
    values = ()
    for i in tl.static_range(4):
        if tl.float32 == DTYPE:
            values += (words[i].to(tl.float32, bitcast=True),)
        else:
            values += ((words[i] & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True).to(tl.float32),)
            values += ((words[i] >> 16).to(tl.uint16).to(DTYPE, bitcast=True).to(tl.float32),)
    return values


@triton.jit
def pack_floats(values: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Round a tuple of float32 numbers to DTYPE and pack them into a unit; the inverse of `unpack_floats`."""
    words = ()
    for i in tl.static_range(4):
        if tl.float32 == DTYPE:
            words += (values[i].to(tl.uint32, bitcast=True),)
        else:
            low = values[2 * i].to(DTYPE).to(tl.uint16, bitcast=True).to(tl.uint32)
            high = values[2 * i + 1].to(DTYPE).to(tl.uint16, bitcast=True).to(tl.uint32)
            words += (low | (high << 16),)
    return words


@triton.jit
def _add(first: tl.tensor, second: tl.tensor) -> tl.tensor:
    """Add two tuples of the same length elementwise."""
    values = ()
    for i in tl.static_range(len(first)):
        values += (first[i] + second[i],)
    return values
