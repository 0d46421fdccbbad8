"""Sum over ranks in one kernel: each rank sends its values to all others and adds what it receives in rank order."""
# mypy: disable-error-code="import-untyped, untyped-decorator, assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tok_kernels.collectives.exchange import SUM_BYTES, SUM_UNITS, ExchangeChannel
from tok_kernels.collectives.triton_signals import end_turn, get, place, put, sendable, take

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WARPS = 4  # one unit per thread
_UNIT = 16  # bytes


def can_sum(size: int, dtype: torch.dtype) -> bool:
    """Return whether `exchange_sum` takes tensors of `size` bytes and this dtype."""
    return dtype in _DTYPES and 0 < size <= SUM_BYTES and size % _UNIT == 0


def exchange_sum(x: Tensor, channel: ExchangeChannel, residual: Tensor | None = None) -> Tensor:
    """Return the sum of all ranks' `x`, plus the `residual`, if any.

    `x` has the same size on all ranks, and the residual has the same values on all. The result overwrites the residual
    if there is one, otherwise `x`. If that tensor is not contiguous or not aligned to 16 bytes, its copy is overwritten
    instead. Sums are computed in float32 and rounded once, to the same bits on every rank. Raises ValueError for
    tensors that cannot be summed.
    """
    if not can_sum(x.nbytes, x.dtype):
        raise ValueError(f"x has {x.nbytes} bytes of {x.dtype}; allowed: multiples of {_UNIT} up to {SUM_BYTES}")
    if residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype):
        raise ValueError(f"residual is {residual.dtype} {tuple(residual.shape)}; allowed: as x, {tuple(x.shape)}")
    x = _plain(x)
    out = x if residual is None else _plain(residual)
    units = x.nbytes // _UNIT
    _sum_over_ranks_kernel[(triton.cdiv(units, SUM_UNITS),)](
        *(x, out, units, channel.buffers, channel.turns, channel.patience),
        ADD=residual is not None,
        RANK=channel.rank,
        RANKS=channel.ranks,
        PROGRAMS=channel.programs,
        WORDS=channel.words,
        num_warps=_WARPS,
    )
    return out


def _plain(x: Tensor) -> Tensor:
    """Return x, or a copy if x is not contiguous or not aligned to 16 bytes."""
    return x if x.is_contiguous() and x.data_ptr() % _UNIT == 0 else x.clone(memory_format=torch.contiguous_format)


@triton.jit(do_not_specialize=["units"])
def _sum_over_ranks_kernel(
    x: tl.tensor,
    out: tl.tensor,
    units: tl.tensor,
    buffers: tl.tensor,
    turns: tl.tensor,
    patience: tl.tensor,
    ADD: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:
    """Sum units of 16 bytes over ranks; each thread sums one unit of all ranks.

    With ADD, add the values at `out`, too.
    """
    program = tl.program_id(0)
    unit = tl.arange(0, WORDS // 4)
    here = program * (WORDS // 4) + unit < units
    at = (program * (WORDS // 4) + unit) * 4
    turn = tl.load(turns + program)
    own = get(x.to(tl.pointer_type(tl.uint32)) + at, here)
    own = (sendable(own[0]), sendable(own[1]), sendable(own[2]), sendable(own[3]))
    for to in tl.static_range(RANKS):
        if to != RANK:
            put(place(buffers[to], turn, RANK, program, RANKS, PROGRAMS, WORDS) + unit * 4, own, here)
    if ADD:
        before = get(out.to(tl.pointer_type(tl.uint32)) + at, here)
    total = numbers(own, x.dtype.element_ty)
    for source in tl.static_range(RANKS):
        if source == RANK:
            words = own
        else:
            words = take(place(buffers[RANK], turn, source, program, RANKS, PROGRAMS, WORDS) + unit * 4, here, patience)
        found = numbers(words, x.dtype.element_ty)
        total = found if source == 0 else _added(total, found)
    if ADD:
        total = _added(total, numbers(before, x.dtype.element_ty))
    put(out.to(tl.pointer_type(tl.uint32)) + at, words_of(total, x.dtype.element_ty), here)
    end_turn(turns, program, turn)


@triton.jit
def numbers(words: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Unpack a unit of four words to float32: four numbers of 32 bits, or eight numbers of 16 bits."""
    found = ()
    for i in tl.static_range(4):
        if tl.float32 == DTYPE:
            found += (words[i].to(tl.float32, bitcast=True),)
        else:
            found += ((words[i] & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True).to(tl.float32),)
            found += ((words[i] >> 16).to(tl.uint16).to(DTYPE, bitcast=True).to(tl.float32),)
    return found


@triton.jit
def words_of(found: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Pack float32 numbers into a unit of four words, rounded to nearest; the inverse of `numbers`."""
    words = ()
    for i in tl.static_range(4):
        if tl.float32 == DTYPE:
            words += (found[i].to(tl.uint32, bitcast=True),)
        else:
            low = found[2 * i].to(DTYPE).to(tl.uint16, bitcast=True).to(tl.uint32)
            high = found[2 * i + 1].to(DTYPE).to(tl.uint16, bitcast=True).to(tl.uint32)
            words += (low | (high << 16),)
    return words


@triton.jit
def _added(ones: tl.tensor, others: tl.tensor) -> tl.tensor:
    """Add two tuples of numbers elementwise."""
    found = ()
    for i in tl.static_range(len(ones)):
        found += (ones[i] + others[i],)
    return found
