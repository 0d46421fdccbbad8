"""Define device functions, in PTX, that send words to other ranks and wait for their words (symmetric memory).

`tok_kernels.collectives.exchange` describes the protocol. A word is a uint32, and a unit is four words (16 bytes). Each
word is written and read atomically, but a reader may see only some words of a unit.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl

_EMPTY = tl.constexpr(0xFFFFFFFF)
# Word sent in place of 0xFFFFFFFF. Both words are NaN as one 32-bit float and as two 16-bit floats.
_EMPTY_SUBSTITUTE = tl.constexpr(0x7FFF7FFF)

_STORE_PTX = tl.constexpr("""{
    .reg .pred here;
    mov.b32 $0, 0;
    setp.ne.b32 here, $6, 0;
    @here st.relaxed.sys.global.v4.b32 [$1], {$2, $3, $4, $5};
}""")

_LOAD_PTX = tl.constexpr("""{
    .reg .pred here;
    mov.b32 $0, 0;
    mov.b32 $1, 0;
    mov.b32 $2, 0;
    mov.b32 $3, 0;
    setp.ne.b32 here, $5, 0;
    @here ld.global.v4.b32 {$0, $1, $2, $3}, [$4];
}""")

_RECEIVE_PTX = tl.constexpr("""{
    .reg .pred absent, empty, late;
    .reg .u64 begun, now;
    mov.b32 $0, 0;
    mov.b32 $1, 0;
    mov.b32 $2, 0;
    mov.b32 $3, 0;
    setp.eq.b32 absent, $5, 0;
    @absent bra taken;
    mov.u64 begun, %clock64;
again:
    ld.relaxed.sys.global.v4.b32 {$0, $1, $2, $3}, [$4];
    setp.eq.b32 empty, $0, -1;
    setp.eq.or.b32 empty, $1, -1, empty;
    setp.eq.or.b32 empty, $2, -1, empty;
    setp.eq.or.b32 empty, $3, -1, empty;
    @!empty bra taken;
    mov.u64 now, %clock64;
    sub.u64 now, now, begun;
    setp.gt.u64 late, now, $6;
    @late trap;
    bra again;
taken:
}""")


@triton.jit
def message_ptr(
    buffer: tl.tensor,
    epoch: tl.tensor,
    source: tl.tensor,
    program: tl.tensor,
    RANKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    WORDS: tl.constexpr,
) -> tl.tensor:
    """Return the pointer, in a rank's buffer, to the words that rank `source` sends in this epoch and program."""
    offset = (((epoch & 1) * RANKS + source) * PROGRAMS + program).to(tl.int64) * WORDS
    return buffer.to(tl.pointer_type(tl.uint32)) + offset


@triton.jit
def escape_empty(word: tl.tensor) -> tl.tensor:
    """Replace the word 0xFFFFFFFF, which marks an empty place, by a substitute."""
    return tl.where(word == _EMPTY, _EMPTY_SUBSTITUTE, word)


@triton.jit
def store_unit(ptr: tl.tensor, words: tl.tensor, mask: tl.tensor) -> None:
    """Store the unit of four `words` at `ptr`, on any rank, if `mask` is true."""
    tl.inline_asm_elementwise(
        *(_STORE_PTX, "=&r,l,r,r,r,r,r", [ptr, words[0], words[1], words[2], words[3], mask.to(tl.int32)]),
        dtype=tl.uint32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def load_unit(ptr: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Load the unit at `ptr`, written before this kernel; return zeros if `mask` is false."""
    return tl.inline_asm_elementwise(
        *(_LOAD_PTX, "=&r,=&r,=&r,=&r,l,r", [ptr, mask.to(tl.int32)]),
        dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def receive_unit(ptr: tl.tensor, mask: tl.tensor, timeout_ticks: tl.tensor) -> tl.tensor:
    """Wait for the unit that another rank sends to `ptr`, reset its words to empty, and return the unit.

    Return zeros if `mask` is false. Trap after `timeout_ticks` GPU clock ticks.
    """
    words = tl.inline_asm_elementwise(
        *(_RECEIVE_PTX, "=&r,=&r,=&r,=&r,l,r,l", [ptr, mask.to(tl.int32), tl.cast(timeout_ticks, tl.int64)]),
        dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32),
        is_pure=False,
        pack=1,
    )
    empty = words[0] * 0 + _EMPTY
    store_unit(ptr, (empty, empty, empty, empty), mask)
    return words


@triton.jit
def advance_epoch(epochs: tl.tensor, program: tl.tensor, epoch: tl.tensor) -> None:
    """Increment the program's epoch, after all threads of the program have read it."""
    tl.debug_barrier()
    tl.store(epochs + program, epoch + 1)
