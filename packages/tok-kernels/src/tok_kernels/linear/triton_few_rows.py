"""Multiply few rows of activations by a weight (skinny GEMM), which is read once, at the memory's bandwidth.

Tensor cores compute `W xᵀ`: the weight fills their tiles of at least 64 rows, and the activations are the narrow second
operand. Both have 16 bits, or both have 8.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator, assignment"

from __future__ import annotations

import threading

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tok_kernels.launch_config import pdl_options
from tok_kernels.linear.quantized_weights import QuantizedRows, ScaledWeight
from tok_kernels.linear.triton_config import MAX_SPLIT_PROGRAMS, FewRowsLaunch

_LINE_BYTES = tl.constexpr(128)  # of the L2 cache


@triton.jit
def _block(ptrs: tl.tensor, block: tl.tensor, K: tl.tensor, BLOCK: tl.constexpr, EVEN: tl.constexpr) -> tl.tensor:
    """Load BLOCK columns of each row of a weight, which is read once; zeros past the end."""
    if EVEN:
        return tl.load(ptrs + block * BLOCK, eviction_policy="evict_first")
    inside = tl.arange(0, BLOCK) < K - block * BLOCK
    return tl.load(ptrs + block * BLOCK, mask=inside[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def _prefetch(row_ptrs: tl.tensor, first: tl.tensor, end: tl.tensor, PREFETCH: tl.constexpr) -> None:
    """Prefetch up to PREFETCH columns of each row, from column `first` on and before `end`, into the L2 cache."""
    size: tl.constexpr = _LINE_BYTES // (row_ptrs.dtype.element_ty.primitive_bitwidth // 8)
    start = tl.minimum(first + tl.arange(0, PREFETCH // size) * size, end - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // dummy $0",
        "=r,l",
        [(row_ptrs[:, None] + start[None, :]).to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["tokens"])
def few_rows_kernel(
    x_ptr: tl.tensor,
    x_row: tl.tensor,
    x_scale_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    out_row: tl.tensor,
    out_column: tl.tensor,
    partial_ptr: tl.tensor,
    arrived_ptr: tl.tensor,
    tokens: tl.tensor,
    outputs: tl.tensor,
    K: tl.tensor,
    T: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    PREFETCH: tl.constexpr,
    EVEN: tl.constexpr,
    SCALED: tl.constexpr,
    ROUNDED: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute the outputs of LINES rows of the weight for T tokens, or their partial sums (split-K).

    SPLITS    programs that divide the columns of each tile; the last to arrive adds their partial sums, in order
    PREFETCH  columns of the weight that are read into the L2 cache before the predecessor ends; 0: none
    EVEN      K is a multiple of BLOCK
    SCALED    x and the weight have 8 bits, and each of their rows a scale
    ROUNDED   the sums are rounded to the weight's dtype before bias, gate and residual follow
    GATED     row `n` of the weight is a gate, and row `n + outputs` its up projection; the result is silu(gate) * up
    BIAS      the bias is added to the result
    ADD       the values at `out` are added to the result
    PDL       this kernel may start before its predecessor ends
    """
    if PDL:
        gdc_launch_dependents()
    own: tl.constexpr = LINES // 2 if GATED else LINES
    tile = tl.program_id(0)
    split = tl.program_id(1)
    part = tl.arange(0, LINES)
    # Lines past the last one read that line again, so that no load needs a mask.
    if GATED:
        # Of 16 lines 8 are gates and 8 their up projections, since a thread's accumulator has lines i and i + 8.
        line = tl.minimum(tile * own + part // 16 * 8 + part % 8, outputs - 1) + part // 8 % 2 * outputs
    else:
        line = tl.minimum(tile * LINES + part, outputs - 1)
    row_ptrs = weight_ptr + line.to(tl.int64) * K
    blocks = tl.cdiv(K, BLOCK)
    first = split * blocks // SPLITS
    last = (split + 1) * blocks // SPLITS
    if PDL:
        if PREFETCH > 0:
            _prefetch(row_ptrs, first * BLOCK, tl.minimum(last * BLOCK, K), PREFETCH)
        gdc_wait()
    t = tl.program_id(2) * T + tl.arange(0, T)
    present = t < tokens
    column = tl.arange(0, BLOCK)
    weight_ptrs = row_ptrs[:, None] + column[None, :]
    x_ptrs = x_ptr + t.to(tl.int64)[:, None] * x_row + column[None, :]
    whole: tl.constexpr = weight_ptr.dtype.element_ty == tl.int8
    sums = tl.zeros((LINES, T), tl.int32 if whole else tl.float32)
    for block in tl.range(first, last, num_stages=STAGES):
        inside = present[:, None]
        if not EVEN:
            inside &= (column < K - block * BLOCK)[None, :]
        x = tl.load(x_ptrs + block * BLOCK, mask=inside, other=0.0)
        sums = tl.dot(_block(weight_ptrs, block, K, BLOCK, EVEN), tl.trans(x), sums, out_dtype=sums.dtype)
    if SPLITS > 1:
        tiles = tl.num_programs(0) * tl.num_programs(2)
        tile_at = tl.program_id(2) * tl.num_programs(0) + tile
        size: tl.constexpr = LINES * T
        place = tile_at * size + part[:, None] * T + tl.arange(0, T)[None, :]
        tl.store(partial_ptr + split * tiles * size + place, sums)
        tl.debug_barrier()  # all threads of the program have stored their parts
        if tl.atomic_add(arrived_ptr + tile_at, 1, sem="acq_rel") < SPLITS - 1:
            return
        sums = tl.zeros((LINES, T), sums.dtype)
        for number in tl.static_range(SPLITS):
            sums += tl.load(partial_ptr + number * tiles * size + place, cache_modifier=".cg")
        tl.store(arrived_ptr + tile_at, 0)
    y = sums.to(tl.float32)
    if SCALED:
        x_scale = tl.load(x_scale_ptr + t, mask=present, other=0.0)
        y *= tl.load(scale_ptr + line)[:, None] * x_scale[None, :]
    rounded: tl.constexpr = weight_ptr.dtype.element_ty
    if ROUNDED:
        y = y.to(rounded).to(tl.float32)
    if BIAS:
        y += tl.load(bias_ptr + line).to(tl.float32)[:, None]
        if ROUNDED:
            y = y.to(rounded).to(tl.float32)
    n = tile * own + tl.arange(0, own)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(y, (LINES // 16, 2, 8, T)), (0, 2, 3, 1)))
        y = tl.reshape(gate / (1.0 + tl.exp(-gate)) * up, (own, T))
    out = out_ptr + t.to(tl.int64)[:, None] * out_row + n[None, :] * out_column
    stored = present[:, None] & (n < outputs)[None, :]
    y = tl.trans(y)
    if ADD:
        y += tl.load(out, mask=stored, other=0.0).to(tl.float32)
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=stored)


class _Counters(threading.local):
    """Split-K arrival counters by device, which kernels leave as zeros.

    Each host thread has its own, since launches of different threads may overlap.
    """

    def __init__(self) -> None:
        self._counters: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        if device not in self._counters:
            self._counters[device] = torch.zeros(MAX_SPLIT_PROGRAMS, dtype=torch.int32, device=device)
        return self._counters[device]


_counters = _Counters()


def launch_few_rows(
    launch: FewRowsLaunch,
    x: Tensor | QuantizedRows,
    weight: Tensor | ScaledWeight,
    bias: Tensor | None,
    residual_TN: Tensor | None,
    *,
    gated: bool,
    rounded: bool = False,
) -> Tensor:
    """Launch the kernel with the given configuration; the other arguments are those of `linear`, checked.

    x is quantised if the weight is. With `rounded`, the GEMM is rounded before bias, gate and residual follow.
    """
    if isinstance(x, QuantizedRows):
        x_TK, x_scale_T, tokens, dtype = x.values_TK, x.scale_TG, x.tokens, x.dtype
    else:
        x_TK = x if x.stride(1) == 1 else x.contiguous()
        x_scale_T, tokens, dtype = x_TK, len(x), x.dtype
    values_NK, scale_N = (weight, weight) if isinstance(weight, Tensor) else (weight.values_NK, weight.scale_NG)
    lines, inputs = values_NK.shape
    outputs = lines // 2 if gated else lines
    out_TN = residual_TN
    if out_TN is None:
        out_TN = torch.empty((tokens, outputs), dtype=dtype, device=x_TK.device)
    tiles = triton.cdiv(outputs, launch.lines // 2 if gated else launch.lines), triton.cdiv(tokens, launch.tokens)
    partial = arrived = values_NK
    if launch.splits > 1:
        size = launch.splits * tiles[0] * tiles[1] * launch.lines * launch.tokens
        partial = torch.empty(size, dtype=torch.float32, device=x_TK.device)
        arrived = _counters.on(x_TK.device)
    few_rows_kernel[(tiles[0], launch.splits, tiles[1])](
        *(x_TK, x_TK.stride(0), x_scale_T, values_NK, scale_N, values_NK if bias is None else bias.contiguous()),
        *(out_TN, *out_TN.stride(), partial, arrived, tokens, outputs, inputs),
        T=launch.tokens,
        LINES=launch.lines,
        BLOCK=launch.block,
        STAGES=launch.stages,
        SPLITS=launch.splits,
        PREFETCH=launch.prefetch,
        EVEN=inputs % launch.block == 0,
        SCALED=not isinstance(weight, Tensor),
        ROUNDED=rounded,
        GATED=gated,
        BIAS=bias is not None,
        ADD=residual_TN is not None,
        num_warps=launch.warps,
        **pdl_options(x_TK.device),
    )
    return out_TN
