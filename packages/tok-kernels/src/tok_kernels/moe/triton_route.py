"""Select each token's top-k experts, and sort token-expert pairs by expert, all on the device.

Axes: T tokens, E experts, C experts of a token (top-k), P = T × C pairs, numbered token by token, R rows: the pairs
sorted by expert, S tiles: up to `tile_rows` consecutive rows of one expert.
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
_MAX_CHUNKS = 128  # maximum programs of `_sort_kernel`, each of which reads the counts of all programs
_SORT_WARPS = 8
_COPY_TOKENS = tl.constexpr(COPY_TOKENS)
_LOWEST = tl.constexpr(-3.0e38)  # below any logit, but above the −inf of experts that are already selected


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """Token-expert pairs sorted by expert, and tiles of rows of one expert (`moe_align_block_size` without padding).

    pair_R     int32, the pair of each row
    tile_3S    int32, expert, first row, and end of the expert's rows of each tile; expert −1: the tile is unused
    tile_rows  maximum rows of a tile

    For example, the experts 1, 0, 1, 1 of four pairs and tiles of 2 rows: pair_R is 1, 0, 2, 3, and the tiles
    (expert, first row, end) are (0, 0, 1), (1, 1, 4) and (1, 3, 4).
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
    top_k: int,
    *,
    normalize: bool,
    copies: ExpertCopies | None = None,
    length_D: Tensor | None = None,
) -> Routing:
    """Compute `Backend.select_experts`. Raises ValueError for a top_k of more than the number of experts."""
    return select_experts_with(power_of_two(len(logits_TE)), logits_TE, top_k, normalize, copies, length_D)


def select_experts_with(
    block_tokens: int,
    logits_TE: Tensor,
    top_k: int,
    normalize: bool,
    copies: ExpertCopies | None,
    length_D: Tensor | None,
) -> Routing:
    """Compute `Backend.select_experts` with up to `block_tokens` tokens per program.

    The order in which floats are summed depends on `block_tokens`.
    """
    tokens, experts = logits_TE.shape
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k is {top_k}; allowed: 1 to {experts}, the number of experts")
    logits_TE = logits_TE if logits_TE.stride(1) == 1 else logits_TE.contiguous()
    expert_TC = torch.empty((tokens, top_k), dtype=torch.int32, device=logits_TE.device)
    weight_TC = torch.empty((tokens, top_k), dtype=torch.float32, device=logits_TE.device)
    if tokens:
        padded_experts = power_of_two(experts)
        block_tokens = min(max(1, SELECT_ELEMENTS // padded_experts), block_tokens)
        _select_kernel[(triton.cdiv(tokens, block_tokens),)](
            *(logits_TE, logits_TE.stride(0), expert_TC, weight_TC, tokens),
            expert_TC if copies is None else copies.slot_EK,
            *((expert_TC, 0) if length_D is None else (length_D, len(length_D))),
            EXPERTS=experts,
            TOP_K=top_k,
            SLOT_COLUMNS=0 if copies is None else copies.slot_EK.shape[1],
            BLOCK_T=block_tokens,
            PADDED_EXPERTS=padded_experts,
            NORMALIZE=normalize,
            num_warps=4,
            **pdl_options(logits_TE.device),
        )
    return Routing(expert_TC, weight_TC, experts if copies is None else copies.slots)


def sort_pairs(routing: Routing, tile_rows: int, local: range | None = None) -> SortedPairs:
    """Sort pairs by expert, pairs of one expert by their numbers, and cut each expert's rows into tiles.

    Pairs of expert −1 are left out. With `local`, pairs of all other experts are left out, too, and the tiles number
    the local experts from 0 on. The sort is a counting sort over chunks of pairs, one chunk per program.
    """
    local = local or range(routing.experts)
    expert_P, experts = routing.expert_TC.view(-1), len(local)
    pairs, device = expert_P.numel(), expert_P.device
    padded_experts = power_of_two(experts)
    block = max(16, min(_BLOCK_ELEMENTS // padded_experts, 64, power_of_two(pairs)))
    chunk_size = triton.cdiv(pairs, block * _MAX_CHUNKS) * block
    chunks = triton.cdiv(pairs, chunk_size)
    counts = torch.empty((chunks, experts), dtype=torch.int32, device=device)
    pair_R = torch.empty(pairs, dtype=torch.int32, device=device)
    tile_3S = torch.empty((3, pairs // tile_rows + min(experts, pairs)), dtype=torch.int32, device=device)
    sizes = {"EXPERTS": experts, "BLOCK": block, "PADDED_EXPERTS": padded_experts}
    options = {**sizes, "num_warps": _SORT_WARPS, **pdl_options(device)}
    if chunks > 1:
        _count_kernel[(chunks,)](expert_P, counts, pairs, local.start, chunk_size, **options)
    _sort_kernel[(chunks,)](
        *(expert_P, counts, pair_R, tile_3S, pairs, local.start, chunk_size, chunks, tile_3S.shape[1]),
        TILE_ROWS=tile_rows,
        COUNTED=chunks > 1,
        **options,
    )
    return SortedPairs(pair_R, tile_3S, tile_rows)


# A value that changes from step to step must not recompile the kernel.
@triton.jit(do_not_specialize=["tokens", "num_lengths"], do_not_specialize_on_alignment=["length_ptr"])
def _select_kernel(
    logits_ptr: tl.tensor,
    logits_stride: tl.tensor,
    expert_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    tokens: tl.tensor,
    slot_ptr: tl.tensor,
    length_ptr: tl.tensor,
    num_lengths: tl.tensor,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOT_COLUMNS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Select the TOP_K experts of BLOCK_T tokens, one expert after the other. Grid: `(⌈tokens / BLOCK_T⌉,)`.

    1. Load the router logits of the tokens, `[BLOCK_T, PADDED_EXPERTS]`.
    2. Compute the denominator of the weights: the softmax over all experts, or over the selected ones (NORMALIZE).
    3. TOP_K times: select the largest remaining logit, store the expert and its weight, and mask the expert.

    logits_ptr             [tokens, EXPERTS], with `logits_stride` between tokens
    expert_ptr             int32 [tokens, TOP_K], result
    weight_ptr             float32 [tokens, TOP_K], result
    slot_ptr               int32 [EXPERTS, SLOT_COLUMNS], `ExpertCopies.slot_EK`; SLOT_COLUMNS 0: do not map to slots
    length_ptr             int32 [num_lengths], context lengths of the first tokens; tokens of length 0 get expert −1
    PDL                    this kernel may start before its predecessor ends
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()

    # Load the logits. Rows past the last token read that token again.
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.arange(0, PADDED_EXPERTS)
    offset = tl.minimum(token, tokens - 1).to(tl.int64)[:, None] * logits_stride + expert[None, :]
    logits = tl.load(logits_ptr + offset, mask=(expert < EXPERTS)[None, :], other=float("-inf")).to(tl.float32)
    remaining = tl.where(
        (expert < EXPERTS)[None, :] & (logits > _LOWEST), logits, tl.where(expert < EXPERTS, _LOWEST, float("-inf"))
    )

    # Compute the denominator of the weights.
    largest = tl.max(remaining, 1)
    total = tl.sum(tl.exp(logits - largest[:, None]), 1)
    is_padding = tl.load(length_ptr + token, mask=token < num_lengths, other=1) == 0
    if NORMALIZE:
        total = tl.zeros((BLOCK_T,), tl.float32)
        unselected = remaining
        for _ in tl.static_range(TOP_K):
            total += tl.exp(tl.max(unselected, 1) - largest)
            unselected = tl.where(expert[None, :] == tl.argmax(unselected, 1)[:, None], float("-inf"), unselected)

    # Select the experts.
    for k in tl.static_range(TOP_K):
        best = tl.argmax(remaining, 1)
        weight = tl.exp(tl.max(remaining, 1) - largest) / total
        selected = best
        if SLOT_COLUMNS > 0:
            copy = token // _COPY_TOKENS % tl.load(slot_ptr + best * SLOT_COLUMNS)
            selected = tl.load(slot_ptr + best * SLOT_COLUMNS + 1 + copy)
        tl.store(expert_ptr + token * TOP_K + k, tl.where(is_padding, -1, selected), mask=token < tokens)
        tl.store(weight_ptr + token * TOP_K + k, weight, mask=token < tokens)
        remaining = tl.where(expert[None, :] == best[:, None], float("-inf"), remaining)


@triton.jit
def _local_expert(
    expert_ptr: tl.tensor, pair: tl.tensor, pairs: tl.tensor, first_expert: tl.tensor, EXPERTS: tl.constexpr
) -> tl.tensor:
    """Return the local experts of pairs, counted from 0 on; −1 for other experts, and past the last pair."""
    expert = tl.load(expert_ptr + pair, mask=pair < pairs, other=-1)
    return tl.where((expert >= first_expert) & (expert < first_expert + EXPERTS), expert - first_expert, -1)


@triton.jit
def _one_hot(
    expert_ptr: tl.tensor,
    first: tl.tensor,
    pairs: tl.tensor,
    first_expert: tl.tensor,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
) -> tl.tensor:
    """Return the one-hot local experts of BLOCK pairs from `first` on: int32 `[BLOCK, PADDED_EXPERTS]`."""
    expert = _local_expert(expert_ptr, first + tl.arange(0, BLOCK), pairs, first_expert, EXPERTS)
    return (expert[:, None] == tl.arange(0, PADDED_EXPERTS)[None, :]).to(tl.int32)


@triton.jit
def _count_chunk(
    expert_ptr: tl.tensor,
    pairs: tl.tensor,
    first_expert: tl.tensor,
    chunk_size: tl.tensor,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
) -> tl.tensor:
    """Return the number of pairs of each local expert in this program's chunk: int32 `[PADDED_EXPERTS]`."""
    count = tl.zeros((PADDED_EXPERTS,), tl.int32)
    start = tl.program_id(0) * chunk_size
    for first in range(0, chunk_size, BLOCK):
        count += tl.sum(_one_hot(expert_ptr, start + first, pairs, first_expert, EXPERTS, BLOCK, PADDED_EXPERTS), 0)
    return count


@triton.jit(do_not_specialize=["pairs", "chunk_size"])
def _count_kernel(
    expert_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    pairs: tl.tensor,
    first_expert: tl.tensor,
    chunk_size: tl.tensor,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Count the pairs of each local expert in one chunk of `chunk_size` pairs. Grid: `(chunks,)`.

    expert_ptr  int32 [pairs], the expert of each pair
    counts_ptr  int32 [chunks, EXPERTS], result
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.arange(0, PADDED_EXPERTS)
    count = _count_chunk(expert_ptr, pairs, first_expert, chunk_size, EXPERTS, BLOCK, PADDED_EXPERTS)
    tl.store(counts_ptr + tl.program_id(0) * EXPERTS + expert, count, mask=expert < EXPERTS)


@triton.jit(do_not_specialize=["pairs", "chunk_size", "chunks", "tiles"])
def _sort_kernel(
    expert_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    pair_ptr: tl.tensor,
    tile_ptr: tl.tensor,
    pairs: tl.tensor,
    first_expert: tl.tensor,
    chunk_size: tl.tensor,
    chunks: tl.tensor,
    tiles: tl.tensor,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    COUNTED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Write the sorted rows of one chunk of `chunk_size` pairs, and a part of the tiles. Grid: `(chunks,)`.

    1. Sum the counts of all chunks and of earlier chunks. Each expert's rows begin where the previous expert's end.
    2. Write each pair of the chunk to the next row of its expert.
    3. Derive the number of tiles of each expert, and write expert, first row and end of the program's tiles.

    expert_ptr    int32 [pairs], the expert of each pair
    counts_ptr    int32 [chunks, EXPERTS], from `_count_kernel` if COUNTED; otherwise there is one chunk
    pair_ptr      int32 [pairs], `SortedPairs.pair_R`, result
    tile_ptr      int32 [3, tiles], `SortedPairs.tile_3S`, result
    first_expert  first of the EXPERTS local experts
    BLOCK         pairs, or tiles, of an iteration
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    chunk = tl.program_id(0)
    if COUNTED:
        expert_count, earlier_count = _sum_counts(counts_ptr, chunks, EXPERTS, BLOCK, PADDED_EXPERTS)
    else:
        expert_count = _count_chunk(expert_ptr, pairs, first_expert, chunk_size, EXPERTS, BLOCK, PADDED_EXPERTS)
        earlier_count = tl.zeros((PADDED_EXPERTS,), tl.int32)
    expert_end = tl.cumsum(expert_count, 0)

    # Write the chunk's pairs. The row of a pair follows those of earlier pairs of its expert.
    next_row = expert_end - expert_count + earlier_count
    for first in range(0, chunk_size, BLOCK):
        one_hot = _one_hot(expert_ptr, chunk * chunk_size + first, pairs, first_expert, EXPERTS, BLOCK, PADDED_EXPERTS)
        pair = chunk * chunk_size + first + tl.arange(0, BLOCK)
        pair_expert = _local_expert(expert_ptr, pair, pairs, first_expert, EXPERTS)
        is_earlier = pair_expert[None, :] == pair_expert[:, None]
        is_earlier &= pair[None, :] < pair[:, None]
        row = tl.sum(one_hot * next_row[None, :], 1) + tl.sum(is_earlier.to(tl.int32), 1)
        tl.store(pair_ptr + row, pair, mask=pair_expert >= 0)
        next_row += tl.sum(one_hot, 0)

    _write_tiles(tile_ptr, tiles, chunks, expert_count, expert_end, TILE_ROWS, BLOCK, PADDED_EXPERTS)


@triton.jit
def _sum_counts(
    counts_ptr: tl.tensor,
    chunks: tl.tensor,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Return the pairs of each expert in all chunks, and in those before the program's: int32 `[PADDED_EXPERTS]`."""
    expert = tl.arange(0, PADDED_EXPERTS)
    earlier_count = tl.zeros((PADDED_EXPERTS,), tl.int32)
    expert_count = tl.zeros((PADDED_EXPERTS,), tl.int32)
    for first in range(0, chunks, BLOCK):
        chunk = first + tl.arange(0, BLOCK)
        inside = (chunk < chunks)[:, None] & (expert < EXPERTS)[None, :]
        count = tl.load(counts_ptr + chunk[:, None] * EXPERTS + expert[None, :], mask=inside, other=0)
        expert_count += tl.sum(count, 0)
        earlier_count += tl.sum(tl.where((chunk < tl.program_id(0))[:, None], count, 0), 0)
    return expert_count, earlier_count


@triton.jit
def _write_tiles(
    tile_ptr: tl.tensor,
    tiles: tl.tensor,
    chunks: tl.tensor,
    expert_count: tl.tensor,
    expert_end: tl.tensor,
    TILE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
) -> None:
    """Write the program's part of `SortedPairs.tile_3S`: each `chunks`-th block of BLOCK tiles.

    `expert_count` and `expert_end`, int32 `[PADDED_EXPERTS]`, are the number of rows of each expert, and their end.
    """
    expert = tl.arange(0, PADDED_EXPERTS)
    tile_count = tl.cdiv(expert_count, TILE_ROWS)
    tile_end = tl.cumsum(tile_count, 0)
    for first in range(tl.program_id(0) * BLOCK, tiles, chunks * BLOCK):
        tile = first + tl.arange(0, BLOCK)
        tile_begin = tile_end - tile_count
        one_hot = ((tile[:, None] >= tile_begin[None, :]) & (tile[:, None] < tile_end[None, :])).to(tl.int32)
        tile_expert = tl.sum(one_hot * expert[None, :], 1)
        tile_expert = tl.where(tl.sum(one_hot, 1) > 0, tile_expert, -1)
        expert_begin = (expert_end - expert_count)[None, :]
        begin = tl.sum(one_hot * (expert_begin + (tile[:, None] - tile_begin[None, :]) * TILE_ROWS), 1)
        end = tl.sum(one_hot * expert_end[None, :], 1)
        inside = tile < tiles
        tl.store(tile_ptr + tile, tile_expert, mask=inside)
        tl.store(tile_ptr + tiles + tile, begin, mask=inside)
        tl.store(tile_ptr + 2 * tiles + tile, end, mask=inside)
