"""Route tokens to their top-k experts, and sort pairs of tokens and experts by expert, all on the device.

Axes: T tokens, E experts, C experts of a token, P = T × C pairs, numbered token by token, R rows: the pairs sorted by
expert, S tiles: up to `tile_rows` consecutive rows of one expert.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator, assignment"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tok_kernels.launch_config import pdl_options, power_of_two
from tok_kernels.moe.interface import COPY_TOKENS, ExpertCopies, Routing

SELECT_ELEMENTS = 1024  # maximum logits of a program of `_select_kernel`
_BLOCK_ELEMENTS = 8192  # maximum pairs × experts that a program of `_sort_kernel` compares at once
_MAX_CHUNKS = 128  # maximum programs of `_sort_kernel`, each of which reads the counts of all
_SORT_WARPS = 8
_COPY_TOKENS = tl.constexpr(COPY_TOKENS)
_LOWEST = tl.constexpr(-3.0e38)  # below any logit, and above the −inf of experts that are taken


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """Pairs sorted by expert, and tiles of rows.

    pair_R     int32: the pair of each row
    tile_3S    int32: expert, first row, and the end of the expert's rows; the expert of an unused tile is −1
    tile_rows  rows of a tile
    """

    pair_R: Tensor
    tile_3S: Tensor
    tile_rows: int

    @property
    def tiles(self) -> int:
        """The upper bound S of the number of tiles."""
        return self.tile_3S.shape[1]


def select_experts(
    logits_TE: Tensor,
    chosen: int,
    *,
    normalize: bool,
    copies: ExpertCopies | None = None,
    length_D: Tensor | None = None,
) -> Routing:
    """Compute `Backend.select_experts`. Raises ValueError for more experts of a token than there are."""
    return select_experts_with(power_of_two(len(logits_TE)), logits_TE, chosen, normalize, copies, length_D)


def select_experts_with(
    rows: int,
    logits_TE: Tensor,
    chosen: int,
    normalize: bool,
    copies: ExpertCopies | None,
    length_D: Tensor | None,
) -> Routing:
    """Compute `Backend.select_experts` by programs of up to `rows` tokens; `rows` decides the order of float sums."""
    tokens, experts = logits_TE.shape
    if not 1 <= chosen <= experts:
        raise ValueError(f"chosen is {chosen}; allowed: 1 to {experts}, the number of experts")
    logits_TE = logits_TE if logits_TE.stride(1) == 1 else logits_TE.contiguous()
    expert_TC = torch.empty((tokens, chosen), dtype=torch.int32, device=logits_TE.device)
    weight_TC = torch.empty((tokens, chosen), dtype=torch.float32, device=logits_TE.device)
    if tokens:
        width = power_of_two(experts)
        rows = min(max(1, SELECT_ELEMENTS // width), rows)
        _select_kernel[(triton.cdiv(tokens, rows),)](
            *(logits_TE, logits_TE.stride(0), expert_TC, weight_TC, tokens),
            expert_TC if copies is None else copies.slot_EK,
            *((expert_TC, 0) if length_D is None else (length_D, len(length_D))),
            E=experts,
            C=chosen,
            COPIES=0 if copies is None else copies.slot_EK.shape[1],
            ROWS=rows,
            WIDTH=width,
            NORMALIZE=normalize,
            num_warps=4,
            **pdl_options(logits_TE.device),
        )
    return Routing(expert_TC, weight_TC, experts if copies is None else copies.slots)


def sort_pairs(routing: Routing, tile_rows: int, held: range | None = None) -> SortedPairs:
    """Sort pairs by expert, pairs of one expert by their numbers, and cut each expert's rows into tiles.

    Pairs of expert −1 are left out, and with `held` those of other experts; tiles number the held experts from 0 on.
    """
    held = held or range(routing.experts)
    expert_P, experts = routing.expert_TC.view(-1), len(held)
    pairs, device = expert_P.numel(), expert_P.device
    width = power_of_two(experts)
    block = max(16, min(_BLOCK_ELEMENTS // width, 64, power_of_two(pairs)))
    chunk = triton.cdiv(pairs, block * _MAX_CHUNKS) * block
    chunks = triton.cdiv(pairs, chunk)
    counts = torch.empty((chunks, experts), dtype=torch.int32, device=device)
    pair_R = torch.empty(pairs, dtype=torch.int32, device=device)
    tile_3S = torch.empty((3, pairs // tile_rows + min(experts, pairs)), dtype=torch.int32, device=device)
    sizes = {"E": experts, "BLOCK": block, "WIDTH": width}
    options = {**sizes, "num_warps": _SORT_WARPS, **pdl_options(device)}
    if chunks > 1:
        _count_kernel[(chunks,)](expert_P, counts, pairs, held.start, chunk, **options)
    _sort_kernel[(chunks,)](
        *(expert_P, counts, pair_R, tile_3S, pairs, held.start, chunk, chunks, tile_3S.shape[1]),
        TILE=tile_rows,
        COUNTED=chunks > 1,
        **options,
    )
    return SortedPairs(pair_R, tile_3S, tile_rows)


# A value that changes from step to step must not recompile the kernel.
@triton.jit(do_not_specialize=["tokens", "decodes"], do_not_specialize_on_alignment=["length_ptr"])
def _select_kernel(
    logits_ptr: tl.tensor,
    logits_row: tl.tensor,
    expert_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    tokens: tl.tensor,
    slot_ptr: tl.tensor,
    length_ptr: tl.tensor,
    decodes: tl.tensor,
    E: tl.constexpr,
    C: tl.constexpr,
    COPIES: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Choose the C experts of ROWS tokens, one after the other.

    decodes    number of lengths, those of the first tokens; a token of length 0 gets expert −1
    COPIES     slots of experts are written: columns of `ExpertCopies.slot_EK`; 0: experts are
    NORMALIZE  weights of a token's experts add up to 1; else those of all experts do
    PDL        this kernel may start before its predecessor ends
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, WIDTH)
    # Rows past the last token read that token again.
    at = tl.minimum(token, tokens - 1).to(tl.int64)[:, None] * logits_row + expert[None, :]
    logits = tl.load(logits_ptr + at, mask=(expert < E)[None, :], other=float("-inf")).to(tl.float32)
    left = tl.where((expert < E)[None, :] & (logits > _LOWEST), logits, tl.where(expert < E, _LOWEST, float("-inf")))
    largest = tl.max(left, 1)
    total = tl.sum(tl.exp(logits - largest[:, None]), 1)
    absent = tl.load(length_ptr + token, mask=token < decodes, other=1) == 0
    if NORMALIZE:
        total = tl.zeros((ROWS,), tl.float32)
        rest = left
        for _ in tl.static_range(C):
            total += tl.exp(tl.max(rest, 1) - largest)
            rest = tl.where(expert[None, :] == tl.argmax(rest, 1)[:, None], float("-inf"), rest)
    for c in tl.static_range(C):
        best = tl.argmax(left, 1)
        weight = tl.exp(tl.max(left, 1) - largest) / total
        to = best
        if COPIES > 0:
            copy = token // _COPY_TOKENS % tl.load(slot_ptr + best * COPIES)
            to = tl.load(slot_ptr + best * COPIES + 1 + copy)
        tl.store(expert_ptr + token * C + c, tl.where(absent, -1, to), mask=token < tokens)
        tl.store(weight_ptr + token * C + c, weight, mask=token < tokens)
        left = tl.where(expert[None, :] == best[:, None], float("-inf"), left)


@triton.jit
def _held_experts(
    expert_ptr: tl.tensor, pair: tl.tensor, pairs: tl.tensor, low: tl.tensor, E: tl.constexpr
) -> tl.tensor:
    """Return the experts of `pair`, counted from `low` on; −1 for those that are not held, and past the last pair."""
    expert = tl.load(expert_ptr + pair, mask=pair < pairs, other=-1)
    return tl.where((expert >= low) & (expert < low + E), expert - low, -1)


@triton.jit
def _matches(
    expert_ptr: tl.tensor,
    first: tl.tensor,
    pairs: tl.tensor,
    low: tl.tensor,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """Return for BLOCK pairs from `first` on whether their expert is that of the column, int32 `[BLOCK, WIDTH]`."""
    expert = _held_experts(expert_ptr, first + tl.arange(0, BLOCK), pairs, low, E)
    return (expert[:, None] == tl.arange(0, WIDTH)[None, :]).to(tl.int32)


@triton.jit
def _count(
    expert_ptr: tl.tensor,
    pairs: tl.tensor,
    low: tl.tensor,
    size: tl.tensor,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """Return the number of pairs of each expert in this program's chunk of `size` pairs."""
    count = tl.zeros((WIDTH,), tl.int32)
    start = tl.program_id(0) * size
    for first in range(0, size, BLOCK):
        count += tl.sum(_matches(expert_ptr, start + first, pairs, low, E, BLOCK, WIDTH), 0)
    return count


@triton.jit(do_not_specialize=["pairs", "size"])
def _count_kernel(
    expert_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    pairs: tl.tensor,
    low: tl.tensor,
    size: tl.tensor,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Write the number of pairs of each expert in this program's chunk of `size` pairs."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.arange(0, WIDTH)
    count = _count(expert_ptr, pairs, low, size, E, BLOCK, WIDTH)
    tl.store(counts_ptr + tl.program_id(0) * E + expert, count, mask=expert < E)


@triton.jit(do_not_specialize=["pairs", "size", "chunks", "tiles"])
def _sort_kernel(
    expert_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    pair_ptr: tl.tensor,
    tile_ptr: tl.tensor,
    pairs: tl.tensor,
    low: tl.tensor,
    size: tl.tensor,
    chunks: tl.tensor,
    tiles: tl.tensor,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    COUNTED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Write the rows of this program's chunk of `size` pairs, and its share of the tiles.

    COUNTED  `_count_kernel` has counted the pairs of all chunks; else there is one chunk
    E        number of experts from `low` on whose pairs are sorted
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.arange(0, WIDTH)
    chunk = tl.program_id(0)
    earlier = tl.zeros((WIDTH,), tl.int32)
    if COUNTED:
        total = tl.zeros((WIDTH,), tl.int32)
        for first in range(0, chunks, BLOCK):
            other = first + tl.arange(0, BLOCK)
            inside = (other < chunks)[:, None] & (expert < E)[None, :]
            count = tl.load(counts_ptr + other[:, None] * E + expert[None, :], mask=inside, other=0)
            total += tl.sum(count, 0)
            earlier += tl.sum(tl.where((other < chunk)[:, None], count, 0), 0)
    else:
        total = _count(expert_ptr, pairs, low, size, E, BLOCK, WIDTH)
    stop = tl.cumsum(total, 0)
    row = stop - total + earlier
    for first in range(0, size, BLOCK):
        match = _matches(expert_ptr, chunk * size + first, pairs, low, E, BLOCK, WIDTH)
        pair = chunk * size + first + tl.arange(0, BLOCK)
        own_expert = _held_experts(expert_ptr, pair, pairs, low, E)
        earlier_pair = own_expert[None, :] == own_expert[:, None]
        earlier_pair &= pair[None, :] < pair[:, None]
        at = tl.sum(match * row[None, :], 1) + tl.sum(earlier_pair.to(tl.int32), 1)
        tl.store(pair_ptr + at, pair, mask=own_expert >= 0)
        row += tl.sum(match, 0)
    own = tl.cdiv(total, TILE)
    last = tl.cumsum(own, 0)
    for first in range(chunk * BLOCK, tiles, chunks * BLOCK):
        tile = first + tl.arange(0, BLOCK)
        match = ((tile[:, None] >= (last - own)[None, :]) & (tile[:, None] < last[None, :])).to(tl.int32)
        of_expert = tl.sum(match * expert[None, :], 1)
        of_expert = tl.where(tl.sum(match, 1) > 0, of_expert, -1)
        begin = tl.sum(match * ((stop - total)[None, :] + (tile[:, None] - (last - own)[None, :]) * TILE), 1)
        end = tl.sum(match * stop[None, :], 1)
        inside = tile < tiles
        tl.store(tile_ptr + tile, of_expert, mask=inside)
        tl.store(tile_ptr + tiles + tile, begin, mask=inside)
        tl.store(tile_ptr + 2 * tiles + tile, end, mask=inside)
