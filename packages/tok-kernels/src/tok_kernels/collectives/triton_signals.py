"""Send words to other ranks from within a kernel and wait for their words, in PTX.

`tok_kernels.collectives.exchange` describes the protocol. A word is a uint32, and a unit is four words, 16 bytes. Each
word is written and read atomically; a unit as a whole may not be.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl

_EMPTY = tl.constexpr(0xFFFFFFFF)
# Word sent in place of 0xFFFFFFFF. Like that word, it is NaN both as two 16-bit floats and as one 32-bit float.
_INSTEAD = tl.constexpr(0x7FFF7FFF)

_PUT = tl.constexpr("""{
    .reg .pred here;
    mov.b32 $0, 0;
    setp.ne.b32 here, $6, 0;
    @here st.relaxed.sys.global.v4.b32 [$1], {$2, $3, $4, $5};
}""")

_GET = tl.constexpr("""{
    .reg .pred here;
    mov.b32 $0, 0;
    mov.b32 $1, 0;
    mov.b32 $2, 0;
    mov.b32 $3, 0;
    setp.ne.b32 here, $5, 0;
    @here ld.global.v4.b32 {$0, $1, $2, $3}, [$4];
}""")

_TAKE = tl.constexpr("""{
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
def place(
    buffer: tl.tensor,
    turn: tl.tensor,
    source: tl.tensor,
    program: tl.tensor,
    RANKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    WORDS: tl.constexpr,
) -> tl.tensor:
    """Return the address in a rank's buffer at which the words of rank `source` for this turn and program begin."""
    at = (((turn & 1) * RANKS + source) * PROGRAMS + program).to(tl.int64) * WORDS
    return buffer.to(tl.pointer_type(tl.uint32)) + at


@triton.jit
def sendable(word: tl.tensor) -> tl.tensor:
    """Return the word, or a substitute if it is 0xFFFFFFFF, which means empty."""
    return tl.where(word == _EMPTY, _INSTEAD, word)


@triton.jit
def put(at: tl.tensor, words: tl.tensor, here: tl.tensor) -> None:
    """Write the unit of four `words` to the address `at` if `here` is true."""
    tl.inline_asm_elementwise(
        *(_PUT, "=&r,l,r,r,r,r,r", [at, words[0], words[1], words[2], words[3], here.to(tl.int32)]),
        dtype=tl.uint32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def get(at: tl.tensor, here: tl.tensor) -> tl.tensor:
    """Load the unit at the address `at`, written before this kernel; return zeros if `here` is false."""
    return tl.inline_asm_elementwise(
        *(_GET, "=&r,=&r,=&r,=&r,l,r", [at, here.to(tl.int32)]),
        dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def take(at: tl.tensor, here: tl.tensor, patience: tl.tensor) -> tl.tensor:
    """Wait for the unit that another rank sends to the address `at`, mark the address empty, and return the unit.

    Return zeros if `here` is false. Trap after `patience` clock ticks.
    """
    words = tl.inline_asm_elementwise(
        *(_TAKE, "=&r,=&r,=&r,=&r,l,r,l", [at, here.to(tl.int32), tl.cast(patience, tl.int64)]),
        dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32),
        is_pure=False,
        pack=1,
    )
    empty = words[0] * 0 + _EMPTY
    put(at, (empty, empty, empty, empty), here)
    return words


@triton.jit
def end_turn(turns: tl.tensor, program: tl.tensor, turn: tl.tensor) -> None:
    """Increment the turn counter, once all threads of the program have read it."""
    tl.debug_barrier()
    tl.store(turns + program, turn + 1)
